data "aws_region" "current" {}

locals {
  queues = toset(["inbound", "outbound", "results"])
}

resource "aws_sqs_queue" "main" {
  for_each = local.queues

  name                       = "${var.name_prefix}-${each.key}"
  visibility_timeout_seconds = var.visibility_timeout_seconds
  message_retention_seconds  = var.message_retention_seconds
  receive_wait_time_seconds  = 20
  # Penstock packs messages up to the full 1 MiB; the provider's own default is 256 KiB.
  max_message_size        = 1048576
  sqs_managed_sse_enabled = var.kms_key_arn == null ? true : null
  kms_master_key_id       = var.kms_key_arn
  tags                    = var.tags
}

resource "aws_sqs_queue" "dead_letter" {
  for_each = local.queues

  name                       = "${var.name_prefix}-${each.key}-dlq"
  visibility_timeout_seconds = var.visibility_timeout_seconds
  message_retention_seconds  = var.dead_letter_retention_seconds
  receive_wait_time_seconds  = 20
  max_message_size           = 1048576
  sqs_managed_sse_enabled    = var.kms_key_arn == null ? true : null
  kms_master_key_id          = var.kms_key_arn
  tags                       = var.tags

  lifecycle {
    precondition {
      # A message keeps the time of its first sending when it moves to the dead-letter queue.
      condition     = var.dead_letter_retention_seconds > var.message_retention_seconds
      error_message = "dead_letter_retention_seconds must exceed message_retention_seconds, or messages would expire as they arrive."
    }
  }
}

resource "aws_sqs_queue_redrive_policy" "main" {
  for_each = local.queues

  queue_url = aws_sqs_queue.main[each.key].url
  redrive_policy = jsonencode({
    deadLetterTargetArn = aws_sqs_queue.dead_letter[each.key].arn
    maxReceiveCount     = var.max_receive_count
  })
}

resource "aws_sqs_queue_redrive_allow_policy" "dead_letter" {
  for_each = local.queues

  queue_url = aws_sqs_queue.dead_letter[each.key].url
  redrive_allow_policy = jsonencode({
    redrivePermission = "byQueue"
    sourceQueueArns   = [aws_sqs_queue.main[each.key].arn]
  })
}

locals {
  all_queues = merge(
    { for name, queue in aws_sqs_queue.main : name => queue },
    { for name, queue in aws_sqs_queue.dead_letter : "${name}-dlq" => queue },
  )

  # Written out, so that for_each is known before any queue exists.
  all_queue_names = toset(concat([for name in local.queues : name], [for name in local.queues : "${name}-dlq"]))
}

resource "aws_sqs_queue_policy" "tls_only" {
  for_each = local.all_queue_names

  queue_url = local.all_queues[each.key].url
  policy = jsonencode({
    # Without this very version AWS rewrites the policy and the provider waits for it in vain.
    Version = "2012-10-17"
    Statement = [{
      Sid       = "DenyInsecureTransport"
      Effect    = "Deny"
      Principal = "*"
      Action    = "sqs:*"
      Resource  = local.all_queues[each.key].arn
      Condition = { Bool = { "aws:SecureTransport" = "false" } }
    }]
  })
}
