# The queues, with one for a route whose tasks the function runs. AWS advises a visibility timeout of six times the
# function's timeout, so that a throttled message is not delivered a second time meanwhile.
module "queues" {
  source = "../../terraform"

  name_prefix = var.name_prefix
  routes = {
    lambda = { visibility_timeout_seconds = 6 * var.timeout_seconds }
  }
}

resource "aws_lambda_function" "worker" {
  function_name    = "${var.name_prefix}-worker"
  role             = aws_iam_role.worker.arn
  runtime          = "python3.13"
  architectures    = ["arm64"]
  handler          = var.handler
  filename         = var.package
  source_code_hash = filebase64sha256(var.package)
  timeout          = var.timeout_seconds
  memory_size      = var.memory_megabytes

  environment {
    variables = merge(
      module.queues.settings,
      module.queues.route_settings["lambda"],
      { PENSTOCK_OUTBOUND_QUEUE = module.queues.queue_urls["lambda"] },
      var.environment,
    )
  }

  depends_on = [aws_iam_role_policy.queues, aws_iam_role_policy_attachment.logs]
}

# The answer of the function names the messages that come again; without ReportBatchItemFailures all would be deleted.
resource "aws_lambda_event_source_mapping" "queue" {
  event_source_arn        = module.queues.queue_arns["lambda"]
  function_name           = aws_lambda_function.worker.arn
  batch_size              = 10
  function_response_types = ["ReportBatchItemFailures"]

  scaling_config {
    maximum_concurrency = var.maximum_concurrency
  }
}

# Lambda receives and deletes with the function's role, so it has what a worker of the route may do.
resource "aws_iam_role" "worker" {
  name = "${var.name_prefix}-lambda-worker"
  assume_role_policy = jsonencode({
    Version = "2012-10-17"
    Statement = [{
      Effect    = "Allow"
      Action    = "sts:AssumeRole"
      Principal = { Service = "lambda.amazonaws.com" }
    }]
  })
}

resource "aws_iam_role_policy" "queues" {
  name   = "queues"
  role   = aws_iam_role.worker.id
  policy = module.queues.route_worker_policies["lambda"]
}

data "aws_partition" "current" {}

resource "aws_iam_role_policy_attachment" "logs" {
  role       = aws_iam_role.worker.name
  policy_arn = "arn:${data.aws_partition.current.partition}:iam::aws:policy/service-role/AWSLambdaBasicExecutionRole"
}
