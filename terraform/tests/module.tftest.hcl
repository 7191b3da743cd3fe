# terraform test: no credentials and no resources, since the provider is mocked.

mock_provider "aws" {
  mock_data "aws_region" {
    defaults = { region = "eu-central-1" }
  }
  mock_data "aws_caller_identity" {
    defaults = { account_id = "123456789012" }
  }
  mock_data "aws_partition" {
    defaults = { partition = "aws" }
  }
}

run "defaults" {
  assert {
    condition     = toset(keys(output.queue_urls)) == toset(["inbound", "outbound", "results"])
    error_message = "Without routes there are three queues."
  }
  assert {
    condition     = alltrue([for role in ["inbound", "outbound", "results"] : aws_sqs_queue.main[role].name == "penstock-${role}"])
    error_message = "Queues bear the names that the settings expect."
  }
  assert {
    condition     = alltrue([for role, queue in aws_sqs_queue.main : aws_sqs_queue.dead_letter[role].name == "${queue.name}-dlq"])
    error_message = "Every queue has a dead-letter queue of its name."
  }
  assert {
    condition     = alltrue([for queue in merge(aws_sqs_queue.main, aws_sqs_queue.dead_letter) : queue.sqs_managed_sse_enabled && queue.kms_master_key_id == null])
    error_message = "SQS manages the key unless another is asked for."
  }
  assert {
    condition = alltrue([
      for role, policy in aws_sqs_queue_redrive_policy.main :
      jsondecode(policy.redrive_policy) == { deadLetterTargetArn = aws_sqs_queue.dead_letter[role].arn, maxReceiveCount = 5 }
    ])
    error_message = "Messages go to the dead-letter queue of their own queue, and the count is a number."
  }
  assert {
    condition = alltrue([
      for role, policy in aws_sqs_queue_redrive_allow_policy.dead_letter :
      jsondecode(policy.redrive_allow_policy) == { redrivePermission = "byQueue", sourceQueueArns = [aws_sqs_queue.main[role].arn] }
    ])
    error_message = "A dead-letter queue takes letters of its own queue alone."
  }
  assert {
    condition     = length(aws_sqs_queue_policy.tls_only) == 6
    error_message = "All queues refuse what is not TLS."
  }
  assert {
    condition     = length(aws_kms_key.this) + length(aws_s3_bucket.payloads) + length(aws_cloudwatch_metric_alarm.depth) + length(aws_cloudwatch_dashboard.queues) == 0
    error_message = "Nothing that costs is made unasked."
  }
  assert {
    condition     = output.environment_file == join("", [for name in sort(keys(output.settings)) : "${name}=${output.settings[name]}\n"])
    error_message = "The environment file has a line for each setting."
  }
  assert {
    condition     = output.payload_bucket == null && output.kms_key_arn == null && !contains(keys(output.settings), "PENSTOCK_PAYLOAD_BUCKET")
    error_message = "Without a bucket or a key no output names them."
  }
}

run "policies" {
  variables {
    routes              = { video = {} }
    sqs_send_queue_arns = ["arn:aws:sqs:eu-central-1:123456789012:invoices"]
  }
  assert {
    condition = jsondecode(output.policies["submitter"]) == {
      Version = "2012-10-17"
      Statement = [{
        Sid      = "Consume"
        Effect   = "Allow"
        Action   = ["sqs:ReceiveMessage", "sqs:DeleteMessage", "sqs:ChangeMessageVisibility", "sqs:GetQueueUrl", "sqs:GetQueueAttributes"]
        Resource = [aws_sqs_queue.main["inbound"].arn]
      }]
    }
    error_message = "The submitter takes from the inbound queue and does nothing else."
  }
  assert {
    condition = toset(flatten([for statement in jsondecode(output.policies["scheduler"]).Statement : statement.Resource if contains(statement.Action, "sqs:SendMessage")])) == toset([
      aws_sqs_queue.main["outbound"].arn, aws_sqs_queue.main["video"].arn,
    ])
    error_message = "Schedulers send to the outbound queue and to those of routes."
  }
  assert {
    condition = toset(flatten([for statement in jsondecode(output.route_worker_policies["video"]).Statement : statement.Resource if contains(statement.Action, "sqs:ReceiveMessage")])) == toset([
      aws_sqs_queue.main["video"].arn,
    ])
    error_message = "The workers of a route take from its queue alone."
  }
  assert {
    condition = toset(flatten([for statement in jsondecode(output.policies["worker"]).Statement : statement.Resource if contains(statement.Action, "sqs:SendMessage")])) == toset([
      aws_sqs_queue.main["results"].arn, "arn:aws:sqs:eu-central-1:123456789012:invoices",
    ])
    error_message = "Workers send results, and what sqs.send may."
  }
  assert {
    condition     = !strcontains(join("", concat(values(output.policies), values(output.route_worker_policies))), "*")
    error_message = "No policy of a process holds a wildcard."
  }
  assert {
    condition     = !strcontains(join("", values(output.policies)), "kms:") && !strcontains(join("", values(output.policies)), "s3:")
    error_message = "Without a key and a bucket no policy mentions them."
  }
}

run "routes" {
  variables {
    name_prefix = "shop"
    routes = {
      video = { visibility_timeout_seconds = 600, max_receive_count = 3, message_retention_seconds = 3600 }
      mail  = {}
    }
  }
  assert {
    condition     = aws_sqs_queue.main["video"].name == "shop-video" && aws_sqs_queue.dead_letter["video"].name == "shop-video-dlq"
    error_message = "The queue of a route is named after it."
  }
  assert {
    condition     = aws_sqs_queue.main["video"].visibility_timeout_seconds == 600 && aws_sqs_queue.main["mail"].visibility_timeout_seconds == 60
    error_message = "A route has its own visibility timeout, or that of all."
  }
  assert {
    condition     = jsondecode(aws_sqs_queue_redrive_policy.main["video"].redrive_policy).maxReceiveCount == 3
    error_message = "A route has its own count of receives."
  }
  assert {
    condition     = output.route_settings["video"] == { PENSTOCK_VISIBILITY_TIMEOUT_SECONDS = "600" }
    error_message = "Workers of the route get its visibility timeout as a setting."
  }
}

run "own_key_and_bucket" {
  variables {
    create_kms_key        = true
    create_payload_bucket = true
  }
  assert {
    condition     = alltrue([for queue in merge(aws_sqs_queue.main, aws_sqs_queue.dead_letter) : queue.sqs_managed_sse_enabled == null && queue.kms_master_key_id == aws_kms_key.this[0].arn])
    error_message = "All queues are encrypted with the key, and none with both."
  }
  assert {
    condition     = aws_kms_key.this[0].enable_key_rotation
    error_message = "The key is rotated."
  }
  assert {
    condition     = output.settings["PENSTOCK_PAYLOAD_BUCKET"] == "s3://penstock-payloads-123456789012-eu-central-1"
    error_message = "The processes get the bucket as a setting."
  }
  assert {
    condition     = alltrue([for block in aws_s3_bucket_public_access_block.payloads : block.block_public_acls && block.block_public_policy && block.ignore_public_acls && block.restrict_public_buckets])
    error_message = "The bucket is private."
  }
  assert {
    condition     = toset(flatten([for rule in aws_s3_bucket_lifecycle_configuration.payloads["payloads"].rule : rule.id])) == toset(["abort-uploads"])
    error_message = "Unless asked for, nothing but unfinished uploads is removed by age."
  }
  assert {
    condition = alltrue([
      for process in ["submitter", "resulter"] :
      anytrue([for statement in jsondecode(output.policies[process]).Statement : statement.Resource == [aws_kms_key.this[0].arn] && contains(statement.Action, "kms:Decrypt")])
    ])
    error_message = "Who receives may decrypt."
  }
  assert {
    condition     = !strcontains(output.policies["scheduler"], "s3:") && !strcontains(output.policies["dlq_operator"], "s3:")
    error_message = "Who does not touch payloads has no right to them."
  }
  assert {
    condition     = [for statement in jsondecode(output.policies["producer"]).Statement : statement.Resource if statement.Sid == "OfferPayloads"] == [["${aws_s3_bucket.payloads["payloads"].arn}/offered/*"]]
    error_message = "A producer adds objects where they are taken in, and sees none."
  }
  assert {
    condition     = [for statement in jsondecode(output.policies["supervisor"]).Statement : statement.Resource if statement.Sid == "ListPayloads"] == [[aws_s3_bucket.payloads["payloads"].arn]]
    error_message = "Objects are listed by the bucket."
  }
  assert {
    condition = contains(jsondecode(aws_s3_bucket_policy.payloads["payloads"].policy).Statement, {
      Sid       = "DenyOverwriting"
      Effect    = "Deny"
      Principal = "*"
      Action    = "s3:PutObject"
      Resource  = ["${aws_s3_bucket.payloads["payloads"].arn}/*"]
      Condition = { Null = { "s3:if-none-match" = "true" }, Bool = { "s3:ObjectCreationOperation" = "true" } }
    })
    error_message = "No object is overwritten."
  }
}

run "each_route_has_its_own_objects" {
  variables {
    name_prefix             = "shop"
    routes                  = { video = {}, mail = {} }
    create_payload_bucket   = true
    worker_payload_prefixes = { video = ["queues/shop-outbound/", "2026"] }
  }
  assert {
    condition = alltrue([
      for name, policy in { outbound = output.policies["worker"], mail = output.route_worker_policies["mail"] } :
      [for statement in jsondecode(policy).Statement : statement if strcontains(jsonencode(statement), "s3:")] == [
        {
          Sid      = "KeepPayloads"
          Effect   = "Allow"
          Action   = ["s3:PutObject"]
          Resource = ["${aws_s3_bucket.payloads["payloads"].arn}/queues/shop-${name}/*"]
        },
        {
          Sid      = "FetchPayloads"
          Effect   = "Allow"
          Action   = ["s3:GetObject"]
          Resource = ["${aws_s3_bucket.payloads["payloads"].arn}/queues/shop-${name}/*"]
        },
        {
          Sid       = "LookPayloads"
          Effect    = "Allow"
          Action    = ["s3:ListBucket"]
          Resource  = [aws_s3_bucket.payloads["payloads"].arn]
          Condition = { StringLike = { "s3:prefix" = ["queues/shop-${name}/*"] } }
        },
      ]
    ])
    error_message = "Workers read, write and list the objects of their own queue alone."
  }
  assert {
    condition = [for statement in jsondecode(output.route_worker_policies["video"]).Statement : statement.Resource if contains(["KeepPayloads", "FetchPayloads"], statement.Sid)] == [
      ["${aws_s3_bucket.payloads["payloads"].arn}/queues/shop-video/*"],
      [for prefix in ["queues/shop-video/", "queues/shop-outbound/", "2026"] : "${aws_s3_bucket.payloads["payloads"].arn}/${prefix}*"],
    ]
    error_message = "Workers read what their queue had elsewhere before, and write in their own folder alone."
  }
  assert {
    condition     = [for statement in jsondecode(output.route_worker_policies["video"]).Statement : statement.Condition if statement.Sid == "LookPayloads"] == [{ StringLike = { "s3:prefix" = ["queues/shop-video/*", "queues/shop-outbound/*", "2026*"] } }]
    error_message = "What they read they may list."
  }
}

run "given_key" {
  variables {
    kms_key_arn = "arn:aws:kms:eu-central-1:123456789012:key/1234"
  }
  assert {
    condition     = length(aws_kms_key.this) == 0 && output.kms_key_arn == "arn:aws:kms:eu-central-1:123456789012:key/1234"
    error_message = "A key that is given is used, and none made."
  }
  assert {
    condition     = strcontains(output.policies["producer"], "kms:GenerateDataKey") && !strcontains(output.policies["supervisor"], "kms:")
    error_message = "Who sends needs data keys; who only looks needs no key."
  }
}

run "alarms_and_dashboard" {
  variables {
    alarm_topic_arns = ["arn:aws:sns:eu-central-1:123456789012:operations"]
    routes           = { video = { alarm_age_seconds = 7200, alarm_depth = 50 } }
    create_dashboard = true
  }
  assert {
    condition = alltrue([
      for alarm in concat(values(aws_cloudwatch_metric_alarm.dead_letters), values(aws_cloudwatch_metric_alarm.oldest_message), values(aws_cloudwatch_metric_alarm.depth)) :
      alarm.alarm_actions == toset(["arn:aws:sns:eu-central-1:123456789012:operations"])
    ])
    error_message = "Every alarm notifies the topic."
  }
  assert {
    condition     = length(aws_cloudwatch_metric_alarm.dead_letters) == 4 && aws_cloudwatch_metric_alarm.dead_letters["video"].threshold == 0
    error_message = "One dead letter of any queue is an alarm."
  }
  assert {
    condition     = aws_cloudwatch_metric_alarm.oldest_message["video"].threshold == 7200 && aws_cloudwatch_metric_alarm.oldest_message["inbound"].threshold == 900
    error_message = "A route has its own limit of age."
  }
  assert {
    condition     = aws_cloudwatch_metric_alarm.depth["video"].threshold == 50 && aws_cloudwatch_metric_alarm.depth["inbound"].threshold == 10000
    error_message = "A route has its own limit of depth."
  }
  assert {
    condition     = alltrue([for widget in jsondecode(aws_cloudwatch_dashboard.queues[0].dashboard_body).widgets : length(widget.properties.metrics) == 4])
    error_message = "Each widget shows all queues."
  }
}

run "refuses_a_retention_that_outlasts_the_dead_letters" {
  command = plan
  variables {
    message_retention_seconds     = 1209600
    dead_letter_retention_seconds = 1209600
  }
  expect_failures = [aws_sqs_queue.dead_letter]
}

run "refuses_two_keys" {
  command = plan
  variables {
    create_kms_key = true
    kms_key_arn    = "arn:aws:kms:eu-central-1:123456789012:key/1234"
  }
  expect_failures = [var.create_kms_key]
}

run "refuses_an_alias_for_a_key" {
  command = plan
  variables {
    kms_key_arn = "alias/penstock"
  }
  expect_failures = [var.kms_key_arn]
}

run "refuses_a_route_that_is_called_as_a_queue" {
  command = plan
  variables {
    routes = { results = {} }
  }
  expect_failures = [var.routes]
}

run "refuses_a_route_out_of_range" {
  command = plan
  variables {
    routes = { video = { max_receive_count = 0 } }
  }
  expect_failures = [var.routes]
}

run "refuses_names_that_sqs_refuses" {
  command = plan
  variables {
    name_prefix = "a.b"
  }
  expect_failures = [var.name_prefix]
}

run "refuses_wildcards_among_queues_to_send_to" {
  command = plan
  variables {
    sqs_send_queue_arns = ["arn:aws:sqs:eu-central-1:123456789012:*"]
  }
  expect_failures = [var.sqs_send_queue_arns]
}

run "refuses_payloads_of_a_route_that_is_not_there" {
  command = plan
  variables {
    worker_payload_prefixes = { video = ["queues/penstock-outbound/"] }
  }
  expect_failures = [var.worker_payload_prefixes]
}

run "refuses_to_show_workers_what_clients_offer" {
  command = plan
  variables {
    worker_payload_prefixes = { outbound = ["offered/"] }
  }
  expect_failures = [var.worker_payload_prefixes]
}

run "refuses_to_show_workers_every_folder" {
  command = plan
  variables {
    worker_payload_prefixes = { outbound = ["queues/"] }
  }
  expect_failures = [var.worker_payload_prefixes]
}

run "refuses_payloads_that_would_vanish_under_their_tasks" {
  command = plan
  variables {
    payload_expiration_days = 1
  }
  expect_failures = [var.payload_expiration_days]
}
