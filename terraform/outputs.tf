locals {
  settings = merge(
    {
      PENSTOCK_AWS_REGION                 = data.aws_region.current.region
      PENSTOCK_INBOUND_QUEUE              = aws_sqs_queue.main["inbound"].url
      PENSTOCK_OUTBOUND_QUEUE             = aws_sqs_queue.main["outbound"].url
      PENSTOCK_RESULTS_QUEUE              = aws_sqs_queue.main["results"].url
      PENSTOCK_VISIBILITY_TIMEOUT_SECONDS = tostring(var.visibility_timeout_seconds)
    },
    { for bucket in aws_s3_bucket.payloads : "PENSTOCK_PAYLOAD_BUCKET" => "s3://${bucket.bucket}" },
  )
}

output "settings" {
  description = "Environment of the processes, ready to use; add PENSTOCK_DATABASE_URL for all but the workers."
  value       = local.settings
}

output "environment_file" {
  description = "The same as the lines of an environment file: terraform output -raw environment_file > penstock.env"
  value       = join("", [for name, value in local.settings : "${name}=${value}\n"])
}

output "route_settings" {
  description = "What the workers of a route get on top of settings, by route; start them with penstock worker --queue and its URL."
  value = {
    for route in keys(var.routes) : route => {
      PENSTOCK_VISIBILITY_TIMEOUT_SECONDS = tostring(local.queues[route].visibility_timeout_seconds)
    }
  }
}

output "queue_urls" {
  description = "URLs of the queues, by role (inbound, outbound, results) and by route; those of routes are for penstock routes set and penstock worker --queue."
  value       = { for name, queue in aws_sqs_queue.main : name => queue.url }
}

output "queue_arns" {
  description = "ARNs of the queues, by role and by route."
  value       = { for name, queue in aws_sqs_queue.main : name => queue.arn }
}

output "dead_letter_queue_urls" {
  description = "URLs of the dead-letter queues, by the role or route of the queue they serve."
  value       = { for name, queue in aws_sqs_queue.dead_letter : name => queue.url }
}

output "dead_letter_queue_arns" {
  description = "ARNs of the dead-letter queues, by the role or route of the queue they serve."
  value       = { for name, queue in aws_sqs_queue.dead_letter : name => queue.arn }
}

output "policies" {
  description = "Least-privilege IAM policy documents (JSON), by process: producer, submitter, scheduler, worker, resulter, supervisor, api, and dlq_operator, which is for the api's role too."
  value       = { for process in keys(local.access) : process => local.documents[process] }
}

output "route_worker_policies" {
  description = "The same for the workers of each route, by route."
  value       = { for route in keys(var.routes) : route => local.documents["worker/${route}"] }
}

output "kms_key_arn" {
  description = "ARN of the key that encrypts queues and payloads; null where SQS and S3 manage their own."
  value       = local.key_arn
}

output "payload_bucket" {
  description = "Name of the bucket of large payloads; null where there is none."
  value       = one([for bucket in aws_s3_bucket.payloads : bucket.bucket])
}
