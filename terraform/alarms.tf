locals {
  alarmed_queues = length(var.alarm_topic_arns) > 0 ? local.queues : {}
}

resource "aws_cloudwatch_metric_alarm" "dead_letters" {
  for_each = local.alarmed_queues

  alarm_name          = "${each.value.name}-dlq-not-empty"
  alarm_description   = "Messages of ${each.value.name} were received ${each.value.max_receive_count} times and never deleted. docs/operations.md, PenstockDeadLetters."
  namespace           = "AWS/SQS"
  metric_name         = "ApproximateNumberOfMessagesVisible"
  dimensions          = { QueueName = aws_sqs_queue.dead_letter[each.key].name }
  statistic           = "Maximum"
  period              = 60
  evaluation_periods  = 1
  comparison_operator = "GreaterThanThreshold"
  threshold           = 0
  treat_missing_data  = "notBreaching"
  alarm_actions       = var.alarm_topic_arns
  ok_actions          = var.alarm_topic_arns
  tags                = var.tags
}

resource "aws_cloudwatch_metric_alarm" "oldest_message" {
  for_each = local.alarmed_queues

  alarm_name          = "${each.value.name}-not-drained"
  alarm_description   = "The oldest message of ${each.value.name} is more than ${each.value.alarm_age_seconds} seconds old: its receiver is down or too slow, or a task runs for so long. docs/operations.md, PenstockProcessMissing."
  namespace           = "AWS/SQS"
  metric_name         = "ApproximateAgeOfOldestMessage"
  dimensions          = { QueueName = aws_sqs_queue.main[each.key].name }
  statistic           = "Maximum"
  period              = 60
  evaluation_periods  = 3
  comparison_operator = "GreaterThanThreshold"
  threshold           = each.value.alarm_age_seconds
  treat_missing_data  = "notBreaching"
  alarm_actions       = var.alarm_topic_arns
  ok_actions          = var.alarm_topic_arns
  tags                = var.tags
}

resource "aws_cloudwatch_metric_alarm" "depth" {
  for_each = local.alarmed_queues

  alarm_name          = "${each.value.name}-deep"
  alarm_description   = "More than ${each.value.alarm_depth} messages wait in ${each.value.name}. docs/operations.md, PenstockQueueNotDrained."
  namespace           = "AWS/SQS"
  metric_name         = "ApproximateNumberOfMessagesVisible"
  dimensions          = { QueueName = aws_sqs_queue.main[each.key].name }
  statistic           = "Maximum"
  period              = 60
  evaluation_periods  = 5
  comparison_operator = "GreaterThanThreshold"
  threshold           = each.value.alarm_depth
  treat_missing_data  = "notBreaching"
  alarm_actions       = var.alarm_topic_arns
  ok_actions          = var.alarm_topic_arns
  tags                = var.tags
}
