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
    Produce = [
      "sqs:SendMessage",
      "sqs:GetQueueUrl",
      "sqs:GetQueueAttributes",
    ]
    Inspect = [
      "sqs:GetQueueUrl",
      "sqs:GetQueueAttributes",
    ]
  }
  key_actions = {
    Consume = ["kms:Decrypt"]
    Produce = ["kms:Decrypt", "kms:GenerateDataKey"]
    Inspect = []
  }

  # Who may do what to which queue. The api needs its rights for `penstock dlq` alone; a producer is any
  # program of yours that sends to the inbound queue.
  access = {
    producer  = { Produce = ["inbound"] }
    submitter = { Consume = ["inbound"] }
    scheduler = { Produce = ["outbound"] }
    worker    = { Consume = ["outbound"], Produce = ["results"] }
    resulter  = { Consume = ["results"] }
    api = {
      Consume = ["inbound-dlq", "outbound-dlq", "results-dlq"]
      Produce = ["inbound", "outbound", "results"]
    }
    supervisor = {
      Inspect = ["inbound", "outbound", "results", "inbound-dlq", "outbound-dlq", "results-dlq"]
    }
  }

  key_access = {
    for process, grants in local.access :
    process => distinct(flatten([for verb, _ in grants : local.key_actions[verb]]))
  }
}

data "aws_iam_policy_document" "process" {
  for_each = local.access

  dynamic "statement" {
    for_each = each.value

    content {
      sid       = statement.key
      effect    = "Allow"
      actions   = local.queue_actions[statement.key]
      resources = [for queue in statement.value : local.all_queues[queue].arn]
    }
  }

  dynamic "statement" {
    for_each = var.kms_key_arn != null && length(local.key_access[each.key]) > 0 ? [var.kms_key_arn] : []

    content {
      sid       = "UseKey"
      effect    = "Allow"
      actions   = local.key_access[each.key]
      resources = [statement.value]
    }
  }
}
