data "aws_region" "current" {}

data "aws_caller_identity" "current" {}

data "aws_partition" "current" {}

locals {
  roles = toset(["inbound", "outbound", "results"])

  # What each queue is like: the three of every pipeline, and one for each route.
  queues = merge(
    {
      for role in local.roles : role => {
        name                          = "${var.name_prefix}-${role}"
        visibility_timeout_seconds    = var.visibility_timeout_seconds
        message_retention_seconds     = var.message_retention_seconds
        dead_letter_retention_seconds = var.dead_letter_retention_seconds
        max_receive_count             = var.max_receive_count
        alarm_age_seconds             = var.alarm_age_seconds
        alarm_depth                   = var.alarm_depth
      }
    },
    {
      for route, given in var.routes : route => {
        name                          = "${var.name_prefix}-${route}"
        visibility_timeout_seconds    = coalesce(given.visibility_timeout_seconds, var.visibility_timeout_seconds)
        message_retention_seconds     = coalesce(given.message_retention_seconds, var.message_retention_seconds)
        dead_letter_retention_seconds = coalesce(given.dead_letter_retention_seconds, var.dead_letter_retention_seconds)
        max_receive_count             = coalesce(given.max_receive_count, var.max_receive_count)
        alarm_age_seconds             = coalesce(given.alarm_age_seconds, var.alarm_age_seconds)
        alarm_depth                   = coalesce(given.alarm_depth, var.alarm_depth)
      }
    },
  )
}

resource "aws_sqs_queue" "main" {
  for_each = local.queues

  name                       = each.value.name
  visibility_timeout_seconds = each.value.visibility_timeout_seconds
  message_retention_seconds  = each.value.message_retention_seconds
  receive_wait_time_seconds  = 20
  # Penstock packs messages up to the full 1 MiB; the provider's own default is 256 KiB.
  max_message_size                  = 1048576
  sqs_managed_sse_enabled           = local.own_key ? null : true
  kms_master_key_id                 = local.key_arn
  kms_data_key_reuse_period_seconds = local.own_key ? var.kms_data_key_reuse_seconds : null
  tags                              = var.tags
}

resource "aws_sqs_queue" "dead_letter" {
  for_each = local.queues

  name                              = "${each.value.name}-dlq"
  visibility_timeout_seconds        = each.value.visibility_timeout_seconds
  message_retention_seconds         = each.value.dead_letter_retention_seconds
  receive_wait_time_seconds         = 20
  max_message_size                  = 1048576
  sqs_managed_sse_enabled           = local.own_key ? null : true
  kms_master_key_id                 = local.key_arn
  kms_data_key_reuse_period_seconds = local.own_key ? var.kms_data_key_reuse_seconds : null
  tags                              = var.tags

  lifecycle {
    precondition {
      # A message keeps the time of its first sending when it moves to the dead-letter queue.
      condition     = each.value.dead_letter_retention_seconds > each.value.message_retention_seconds
      error_message = "${each.key}: dead_letter_retention_seconds must exceed message_retention_seconds, or messages would expire as they arrive."
    }
  }
}

resource "aws_sqs_queue_redrive_policy" "main" {
  for_each = local.queues

  queue_url = aws_sqs_queue.main[each.key].url
  redrive_policy = jsonencode({
    deadLetterTargetArn = aws_sqs_queue.dead_letter[each.key].arn
    maxReceiveCount     = each.value.max_receive_count
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
  all_queue_names = toset(concat(keys(local.queues), [for name in keys(local.queues) : "${name}-dlq"]))
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
