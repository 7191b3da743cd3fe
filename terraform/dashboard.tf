locals {
  # One figure of every queue in each widget; the names are not in any order that AWS would keep.
  dashboard_widgets = [
    { title = "Waiting messages", metric = "ApproximateNumberOfMessagesVisible", stat = "Maximum", dead = false },
    { title = "Age of the oldest message (s)", metric = "ApproximateAgeOfOldestMessage", stat = "Maximum", dead = false },
    { title = "Messages being worked on", metric = "ApproximateNumberOfMessagesNotVisible", stat = "Maximum", dead = false },
    { title = "Dead letters", metric = "ApproximateNumberOfMessagesVisible", stat = "Maximum", dead = true },
    { title = "Messages sent", metric = "NumberOfMessagesSent", stat = "Sum", dead = false },
    { title = "Messages deleted", metric = "NumberOfMessagesDeleted", stat = "Sum", dead = false },
  ]
}

resource "aws_cloudwatch_dashboard" "queues" {
  count = var.create_dashboard ? 1 : 0

  dashboard_name = "${var.name_prefix}-queues"
  dashboard_body = jsonencode({
    widgets = [
      for position, widget in local.dashboard_widgets : {
        type   = "metric"
        x      = 12 * (position % 2)
        y      = 6 * floor(position / 2)
        width  = 12
        height = 6
        properties = {
          title   = widget.title
          region  = data.aws_region.current.region
          view    = "timeSeries"
          stacked = false
          period  = 60
          stat    = widget.stat
          yAxis   = { left = { min = 0 } }
          metrics = [
            for name in sort(keys(local.queues)) : [
              "AWS/SQS", widget.metric, "QueueName", widget.dead ? "${local.queues[name].name}-dlq" : local.queues[name].name,
              { label = name },
            ]
          ]
        }
      }
    ]
  })
}
