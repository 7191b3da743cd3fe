# terraform test: no credentials and no resources, since the provider is mocked.

mock_provider "aws" {
  mock_data "aws_region" {
    defaults = { region = "eu-central-1" }
  }
  mock_data "aws_partition" {
    defaults = { partition = "aws" }
  }
  mock_data "aws_caller_identity" {
    defaults = { account_id = "123456789012" }
  }
  mock_resource "aws_iam_role" {
    defaults = { arn = "arn:aws:iam::123456789012:role/penstock-lambda-worker" }
  }
  mock_resource "aws_lambda_function" {
    defaults = { arn = "arn:aws:lambda:eu-central-1:123456789012:function:penstock-worker" }
  }
}

variables {
  package = "./versions.tf" # any file: nothing is uploaded
}

run "the_function_runs_the_tasks_of_its_route" {
  assert {
    condition     = aws_lambda_event_source_mapping.queue.event_source_arn == module.queues.queue_arns["lambda"]
    error_message = "The mapping receives from the route's queue."
  }
  assert {
    condition     = aws_lambda_event_source_mapping.queue.function_response_types == toset(["ReportBatchItemFailures"])
    error_message = "The answer of the function must decide which messages are deleted."
  }
  assert {
    condition     = aws_lambda_function.worker.environment[0].variables["PENSTOCK_RESULTS_QUEUE"] == module.queues.queue_urls["results"]
    error_message = "Results go to the pipeline's queue."
  }
  assert {
    condition     = tonumber(aws_lambda_function.worker.environment[0].variables["PENSTOCK_VISIBILITY_TIMEOUT_SECONDS"]) >= 6 * aws_lambda_function.worker.timeout
    error_message = "The visibility timeout is six times the function's timeout."
  }
  assert {
    condition     = aws_iam_role_policy.queues.policy == module.queues.route_worker_policies["lambda"]
    error_message = "The function may do what a worker of the route may."
  }
}
