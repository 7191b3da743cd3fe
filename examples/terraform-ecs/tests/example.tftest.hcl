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
  mock_resource "aws_db_instance" {
    defaults = { resource_id = "db-ABC", address = "db.example" }
  }
}

variables {
  vpc_id            = "vpc-1"
  subnet_ids        = ["subnet-1", "subnet-2"]
  image             = "registry.example.com/penstock:0.1.0"
  database_password = "0123456789abcdef0123456789abcdef"
  reader_key        = "pstk_0123456789abcdef0123456789abcdef"
  workers = {
    _default = { image = "registry.example.com/myapp:1.0.0", app = "myapp.tasks" }
    video    = { image = "registry.example.com/myapp:1.0.0", app = "myapp.video", concurrency = 4, min = 2, max = 9 }
  }
}

run "every_process_runs" {
  assert {
    condition     = toset(keys(aws_ecs_service.process)) == toset(["submitter", "scheduler", "resulter", "supervisor", "api", "worker", "worker-video"])
    error_message = "Each process is a service, and each route has its workers."
  }
  assert {
    condition = alltrue([
      for name, definition in aws_ecs_task_definition.process :
      jsondecode(definition.container_definitions)[0].readonlyRootFilesystem && jsondecode(definition.container_definitions)[0].stopTimeout <= 120
    ])
    error_message = "No container writes to its image, and none asks for more time than Fargate gives."
  }
  assert {
    condition = alltrue([
      for name, definition in aws_ecs_task_definition.process :
      strcontains(definition.container_definitions, "PENSTOCK_DATABASE_URL") == !startswith(name, "worker")
    ])
    error_message = "Workers have no way to the database."
  }
  assert {
    condition     = jsondecode(aws_ecs_task_definition.process["worker-video"].container_definitions)[0].command == ["worker", "--app", "myapp.video", "--queue", module.queues.queue_urls["video"]]
    error_message = "Workers of a route take from its queue."
  }
  assert {
    condition     = aws_iam_role_policy.process["worker-video/worker/video"].policy == module.queues.route_worker_policies["video"]
    error_message = "Workers of a route have its policy."
  }
  assert {
    condition     = toset([for key, policy in aws_iam_role_policy.process : policy.policy if startswith(key, "api/")]) == toset([module.queues.policies["api"], module.queues.policies["dlq_operator"]])
    error_message = "The api looks after dead letters too."
  }
  assert {
    condition     = !strcontains(join("", [for definition in aws_ecs_task_definition.process : definition.container_definitions]), "0123456789abcdef")
    error_message = "No secret is written into a definition."
  }
  assert {
    condition     = length(aws_lb.api) == 0 && output.api_url == "http://api.penstock.internal:8080"
    error_message = "Without a certificate the api answers by its name in the VPC."
  }
  assert {
    condition     = aws_db_instance.this.storage_encrypted && !aws_db_instance.this.publicly_accessible && aws_db_instance.this.deletion_protection
    error_message = "The database is encrypted, private and not easily lost."
  }
}

run "processes_use_a_role_that_may_not_change_the_schema" {
  assert {
    condition     = jsondecode(aws_ecs_task_definition.migrate.container_definitions)[1].command == ["migrate", "--grant", "penstock_app"] && jsondecode(aws_ecs_task_definition.migrate.container_definitions)[1].dependsOn == [{ condition = "SUCCESS", containerName = "role" }]
    error_message = "The migration grants rights to the role that the container before it creates."
  }
  assert {
    condition     = !contains(flatten([for about in values(local.processes) : values(about.secrets)]), aws_secretsmanager_secret.database_owner.arn)
    error_message = "No process is given the owner of the database."
  }
  assert {
    condition = aws_db_instance.this.iam_database_authentication_enabled && toset(keys(aws_iam_role_policy.database)) == toset(["submitter", "scheduler", "resulter", "supervisor", "api"]) && alltrue([
      for policy in aws_iam_role_policy.database :
      jsondecode(policy.policy).Statement[0].Resource == ["arn:aws:rds-db:eu-central-1:123456789012:dbuser:db-ABC/penstock_app"]
    ])
    error_message = "Each process that needs the database, and no worker, may sign in as the role by a token."
  }
  assert {
    condition = alltrue([
      for name, definition in aws_ecs_task_definition.process :
      strcontains(definition.container_definitions, "postgresql://penstock_app@db.example:5432/penstock") == !startswith(name, "worker")
    ])
    error_message = "Processes are given a URL without a password."
  }
}

run "workers_do_not_reach_the_database" {
  assert {
    condition = alltrue([
      for name, service in aws_ecs_service.process :
      toset(service.network_configuration[0].security_groups) == toset([startswith(name, "worker") ? aws_security_group.workers.id : aws_security_group.processes.id])
    ])
    error_message = "Workers are in a group of their own."
  }
  assert {
    condition     = aws_vpc_security_group_ingress_rule.database.referenced_security_group_id == aws_security_group.processes.id && aws_security_group.processes.id != aws_security_group.workers.id
    error_message = "The database lets in the processes that need it."
  }
}

run "with_a_load_balancer" {
  variables {
    certificate_arn           = "arn:aws:acm:eu-central-1:123456789012:certificate/1"
    client_security_group_ids = ["sg-1"]
  }
  assert {
    condition     = aws_lb.api[0].internal && aws_lb_target_group.api[0].health_check[0].path == "/readyz"
    error_message = "The load balancer is inside, and sends nobody to an api that is not ready."
  }
  assert {
    condition     = aws_lb_target_group.api[0].health_check[0].interval * aws_lb_target_group.api[0].health_check[0].unhealthy_threshold >= 300 && aws_ecs_service.process["api"].health_check_grace_period_seconds >= 1800
    error_message = "ECS replaces no api for an outage of Postgres, nor before the migration has run."
  }
  assert {
    condition     = length(aws_vpc_security_group_ingress_rule.callers) == 0 && length(aws_vpc_security_group_ingress_rule.balancer) == 1
    error_message = "Callers come by the load balancer alone."
  }
}

run "refuses_to_do_without_the_default_fleet" {
  command = plan
  variables {
    workers = { video = { image = "registry.example.com/myapp:1.0.0", app = "myapp.video" } }
  }
  expect_failures = [var.workers]
}

run "refuses_a_name_that_is_too_long_for_a_load_balancer" {
  command = plan
  variables {
    name            = "a-name-of-29-characters-it-is"
    certificate_arn = "arn:aws:acm:eu-central-1:123456789012:certificate/1"
  }
  expect_failures = [var.name]
}

run "refuses_a_password_that_breaks_a_url" {
  command = plan
  variables {
    database_password = "p@ss/word-p@ss/word-p@ss/word"
  }
  expect_failures = [var.database_password]
}

run "only_the_api_reads_from_a_replica" {
  variables {
    database_replica = true
  }
  assert {
    condition = alltrue([
      for name, definition in aws_ecs_task_definition.process :
      strcontains(definition.container_definitions, "PENSTOCK_DATABASE_READ_URL") == (name == "api")
    ])
    error_message = "The api alone has the URL of the replica."
  }
  assert {
    condition     = length(jsondecode(aws_iam_role_policy.database["api"].policy).Statement[0].Resource) == 2
    error_message = "The api may connect to both."
  }
}
