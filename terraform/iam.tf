locals {
  # What each verb needs of a queue, and of the key when it is encrypted with an own one.
  queue_actions = {
    Consume = [
      "sqs:ReceiveMessage",
      "sqs:DeleteMessage",
      "sqs:ChangeMessageVisibility",
      "sqs:GetQueueUrl",
      "sqs:GetQueueAttributes",
    ]
    Send = [
      "sqs:SendMessage",
      "sqs:GetQueueUrl",
    ]
    Inspect = [
      "sqs:GetQueueUrl",
      "sqs:GetQueueAttributes",
    ]
  }
  key_actions = {
    Consume = ["kms:Decrypt"]
    Send    = ["kms:Decrypt", "kms:GenerateDataKey"]
    Inspect = []
  }

  # Who may do what to which queue. A producer is any program of yours that sends to the inbound queue, and may there
  # do what PENSTOCK_INBOUND_METHODS names, for every tenant: enqueue, unless you add more. The rights of
  # dlq_operator are for `penstock dlq`, which works through the api: attach both policies to its role, or leave it out.
  access = {
    producer     = { Send = ["inbound"] }
    submitter    = { Consume = ["inbound"] }
    scheduler    = { Send = concat(["outbound"], keys(var.routes)), Inspect = ["outbound"] }
    worker       = { Consume = ["outbound"], Send = ["results"], Inspect = ["results"] }
    resulter     = { Consume = ["results"] }
    api          = { Inspect = ["inbound", "outbound", "results"] }
    dlq_operator = { Consume = ["inbound-dlq", "outbound-dlq", "results-dlq"], Send = ["inbound", "outbound", "results"] }
    supervisor = {
      Inspect = concat(["inbound", "outbound", "results", "inbound-dlq", "outbound-dlq", "results-dlq"], keys(var.routes))
    }
  }
  route_workers = {
    for route in keys(var.routes) : route => { Consume = [route], Send = ["results"], Inspect = ["results"] }
  }

  # Of the bucket of large payloads. Who reads may list too: else S3 says of an object that is gone that it is forbidden.
  payload_actions = {
    Offer  = ["s3:PutObject"]
    Write  = ["s3:PutObject"]
    Read   = ["s3:GetObject"]
    Keep   = ["s3:PutObject"]
    Fetch  = ["s3:GetObject"]
    List   = ["s3:ListBucket"]
    Remove = ["s3:DeleteObject"]
  }
  # Names of objects are a day and a random part, so workers of one route cannot be kept from objects of another. A day
  # begins with the 2 of its year: workers have no access to what clients offer.
  payload_resources = {
    Offer  = "/offered/*"
    Write  = "/*"
    Read   = "/*"
    Keep   = "/2*"
    Fetch  = "/2*"
    List   = ""
    Remove = "/*"
  }
  payload_key_actions = {
    Offer  = ["kms:Decrypt", "kms:GenerateDataKey"]
    Write  = ["kms:Decrypt", "kms:GenerateDataKey"]
    Read   = ["kms:Decrypt"]
    Keep   = ["kms:Decrypt", "kms:GenerateDataKey"]
    Fetch  = ["kms:Decrypt"]
    List   = []
    Remove = []
  }
  payload_access = {
    producer     = ["Offer"]
    submitter    = ["Write", "Read", "List"]
    scheduler    = []
    worker       = ["Keep", "Fetch", "List"]
    resulter     = []
    api          = ["Write", "Read", "List"]
    dlq_operator = []
    supervisor   = ["Write", "Read", "List", "Remove"]
  }

  # Everybody with a policy: the processes, and a worker for each route, whose key is apart from theirs.
  grants = merge(
    {
      for process, queues in local.access : process => {
        queues   = queues
        payloads = var.create_payload_bucket ? local.payload_access[process] : []
        sends_to = process == "worker" ? var.sqs_send_queue_arns : []
      }
    },
    {
      for route, queues in local.route_workers : "worker/${route}" => {
        queues   = queues
        payloads = var.create_payload_bucket ? local.payload_access["worker"] : []
        sends_to = var.sqs_send_queue_arns
      }
    },
  )

  documents = {
    for name, grant in local.grants : name => jsonencode({
      Version = "2012-10-17"
      Statement = concat(
        [
          for verb, queues in grant.queues : {
            Sid      = verb
            Effect   = "Allow"
            Action   = local.queue_actions[verb]
            Resource = [for queue in queues : local.all_queues[queue].arn]
          }
        ],
        [
          for arns in [grant.sends_to] : {
            Sid      = "Deliver"
            Effect   = "Allow"
            Action   = local.queue_actions["Send"]
            Resource = arns
          } if length(arns) > 0
        ],
        [
          for verb in grant.payloads : {
            Sid      = "${verb}Payloads"
            Effect   = "Allow"
            Action   = local.payload_actions[verb]
            Resource = [for bucket in aws_s3_bucket.payloads : "${bucket.arn}${local.payload_resources[verb]}"]
          }
        ],
        [
          for actions in [distinct(concat(
            flatten([for verb in keys(grant.queues) : local.key_actions[verb]]),
            flatten([for verb in grant.payloads : local.payload_key_actions[verb]]),
            ))] : {
            Sid      = "UseKey"
            Effect   = "Allow"
            Action   = actions
            Resource = [local.key_arn]
          } if local.own_key && length(actions) > 0
        ],
      )
    })
  }
}
