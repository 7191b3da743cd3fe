locals {
  alarmed_queues = length(var.alarm_topic_arns) > 0 ? local.queues : toset([])
}

resource "aws_cloudwatch_metric_alarm" "dead_letters" {
  for_each = local.alarmed_queues

  alarm_name          = "${aws_sqs_queue.dead_letter[each.key].name}-not-empty"
  alarm_description   = "Messages of ${aws_sqs_queue.main[each.key].name} were received ${var.max_receive_count} times and never deleted."
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

  alarm_name          = "${aws_sqs_queue.main[each.key].name}-not-drained"
  alarm_description   = "The oldest message of ${aws_sqs_queue.main[each.key].name} has waited for more than ${var.alarm_age_seconds} seconds."
  namespace           = "AWS/SQS"
  metric_name         = "ApproximateAgeOfOldestMessage"
  dimensions          = { QueueName = aws_sqs_queue.main[each.key].name }
  statistic           = "Maximum"
  period              = 60
  evaluation_periods  = 3
  comparison_operator = "GreaterThanThreshold"
  threshold           = var.alarm_age_seconds
  treat_missing_data  = "notBreaching"
  alarm_actions       = var.alarm_topic_arns
  ok_actions          = var.alarm_topic_arns
  tags                = var.tags
}
