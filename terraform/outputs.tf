output "settings" {
  description = "Environment of the processes, ready to use; add PENSTOCK_DATABASE_URL for all but the workers."
  value = {
    PENSTOCK_AWS_REGION                 = data.aws_region.current.region
    PENSTOCK_INBOUND_QUEUE              = aws_sqs_queue.main["inbound"].url
    PENSTOCK_OUTBOUND_QUEUE             = aws_sqs_queue.main["outbound"].url
    PENSTOCK_RESULTS_QUEUE              = aws_sqs_queue.main["results"].url
    PENSTOCK_VISIBILITY_TIMEOUT_SECONDS = tostring(var.visibility_timeout_seconds)
  }
}

output "queue_arns" {
  description = "ARNs of the three queues, by role: inbound, outbound, results."
  value       = { for name, queue in aws_sqs_queue.main : name => queue.arn }
}

output "dead_letter_queue_urls" {
  description = "URLs of the dead-letter queues, by the role of the queue they serve."
  value       = { for name, queue in aws_sqs_queue.dead_letter : name => queue.url }
}

output "dead_letter_queue_arns" {
  description = "ARNs of the dead-letter queues, by the role of the queue they serve."
  value       = { for name, queue in aws_sqs_queue.dead_letter : name => queue.arn }
}

output "policies" {
  description = "Least-privilege IAM policy documents (JSON), by process: producer, submitter, scheduler, worker, resulter, api, supervisor."
  value       = { for process, document in data.aws_iam_policy_document.process : process => document.json }
}
