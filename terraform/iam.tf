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
  # Look is List of what Fetch reads.
  payload_actions = {
    Offer  = ["s3:PutObject"]
    Write  = ["s3:PutObject"]
    Read   = ["s3:GetObject"]
    Keep   = ["s3:PutObject"]
    Fetch  = ["s3:GetObject"]
    Look   = ["s3:ListBucket"]
    List   = ["s3:ListBucket"]
    Remove = ["s3:DeleteObject"]
  }
  # What names of objects begin with. Those of a task are in the folder of the queue that its workers receive from, those
  # that clients upload in a folder that workers have no access to. Objects of earlier versions have no folder.
  payload_prefixes = {
    Offer  = ["offered/"]
    Write  = ["queues/"]
    Read   = [""]
    List   = [""]
    Remove = [""]
  }
  worker_payload_prefixes = {
    for queue in concat(["outbound"], keys(var.routes)) : queue => {
      Keep  = ["queues/${local.queues[queue].name}/"]
      Fetch = concat(["queues/${local.queues[queue].name}/"], lookup(var.worker_payload_prefixes, queue, []))
    }
  }
  payload_key_actions = {
    Offer  = ["kms:Decrypt", "kms:GenerateDataKey"]
    Write  = ["kms:Decrypt", "kms:GenerateDataKey"]
    Read   = ["kms:Decrypt"]
    Keep   = ["kms:Decrypt", "kms:GenerateDataKey"]
    Fetch  = ["kms:Decrypt"]
    Look   = []
    List   = []
    Remove = []
  }
  payload_access = {
    producer     = ["Offer"]
    submitter    = ["Write", "Read", "List"]
    scheduler    = []
    worker       = ["Keep", "Fetch", "Look"]
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
        prefixes = process == "worker" ? local.worker_payload_prefixes["outbound"] : local.payload_prefixes
        sends_to = process == "worker" ? var.sqs_send_queue_arns : []
      }
    },
    {
      for route, queues in local.route_workers : "worker/${route}" => {
        queues   = queues
        payloads = var.create_payload_bucket ? local.payload_access["worker"] : []
        prefixes = local.worker_payload_prefixes[route]
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
            Resource = [for prefix in grant.prefixes[verb] : "${aws_s3_bucket.payloads["payloads"].arn}/${prefix}*"]
          } if !contains(["List", "Look"], verb)
        ],
        [
          for verb in grant.payloads : {
            Sid      = "${verb}Payloads"
            Effect   = "Allow"
            Action   = local.payload_actions[verb]
            Resource = [aws_s3_bucket.payloads["payloads"].arn]
          } if verb == "List"
        ],
        [
          for verb in grant.payloads : {
            Sid       = "${verb}Payloads"
            Effect    = "Allow"
            Action    = local.payload_actions[verb]
            Resource  = [aws_s3_bucket.payloads["payloads"].arn]
            Condition = { StringLike = { "s3:prefix" = [for prefix in grant.prefixes["Fetch"] : "${prefix}*"] } }
          } if verb == "Look"
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
