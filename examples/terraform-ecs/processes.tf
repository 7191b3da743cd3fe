locals {
  routes = { for route, fleet in var.workers : route => fleet if route != "_default" }

  # All processes: those that need the database, and a fleet of workers for each route, which need none. policies: what its
  # role may do on AWS; for the api that of `penstock dlq` too.
  processes = merge(
    {
      for process, size in {
        submitter  = { cpu = 256, memory = 512 }
        scheduler  = { cpu = 512, memory = 1024 }
        resulter   = { cpu = 512, memory = 1024 }
        supervisor = { cpu = 256, memory = 512 }
        api        = { cpu = 512, memory = 1024 }
        } : process => {
        image    = var.image
        command  = [process]
        cpu      = size.cpu
        memory   = size.memory
        count    = 2
        grace    = 25
        policies = process == "api" ? ["api", "dlq_operator"] : [process]
        environment = process != "api" ? {} : {
          PENSTOCK_HTTP_HOST        = "0.0.0.0"
          PENSTOCK_HTTP_PORT        = "8080"
          PENSTOCK_API_REQUIRE_KEYS = "true"
        }
        secrets          = process != "api" ? {} : { PENSTOCK_API_KEYS = aws_secretsmanager_secret.api_keys.arn }
        reaches_database = true
      }
    },
    {
      for route, fleet in var.workers : route == "_default" ? "worker" : "worker-${route}" => {
        image = fleet.image
        command = concat(
          ["worker", "--app", fleet.app],
          route == "_default" ? [] : ["--queue", module.queues.queue_urls[route]],
        )
        cpu    = fleet.cpu
        memory = fleet.memory
        count  = fleet.min
        # Fargate gives no more than 120 s to stop.
        grace    = 110
        policies = [route == "_default" ? "worker" : "worker/${route}"]
        environment = merge(
          {
            PENSTOCK_WORKER_CONCURRENCY = tostring(fleet.concurrency)
            PENSTOCK_CONTROL_URL        = "http://api.${aws_service_discovery_private_dns_namespace.this.name}:8080/rpc"
          },
          route == "_default" ? {} : module.queues.route_settings[route],
        )
        secrets          = { PENSTOCK_CONTROL_API_KEY = aws_secretsmanager_secret.reader_key.arn }
        reaches_database = false
      }
    },
  )

  policies = merge(
    module.queues.policies,
    { for route, document in module.queues.route_worker_policies : "worker/${route}" => document },
  )

  environment = merge(
    module.queues.settings,
    {
      PENSTOCK_METRICS_HOST = "0.0.0.0"
      PENSTOCK_METRICS_PORT = "9464"
      PENSTOCK_LOG_FORMAT   = "json"
    },
  )
  database_environment = merge(
    { PENSTOCK_DATABASE_SSL_MODE = var.database_ssl_root_cert == null ? "require" : "verify-full" },
    var.database_ssl_root_cert == null ? {} : { PENSTOCK_DATABASE_SSL_ROOT_CERT = var.database_ssl_root_cert },
  )

  # No process has a password: each new connection has a token that the process's role signs.
  process_database_environment = merge(local.database_environment, {
    PENSTOCK_DATABASE_URL = "postgresql://${local.database_role}@${aws_db_instance.this.address}:5432/penstock"
    PENSTOCK_DATABASE_IAM = "true"
  })
  database_role = "penstock_app"

  assumed_by_tasks = jsonencode({
    Version = "2012-10-17"
    Statement = [{
      Effect    = "Allow"
      Principal = { Service = "ecs-tasks.amazonaws.com" }
      Action    = "sts:AssumeRole"
    }]
  })

  # What a container of Penstock is like, whatever it runs.
  container = {
    essential              = true
    readonlyRootFilesystem = true
    linuxParameters        = { initProcessEnabled = true, capabilities = { drop = ["ALL"] } }
    mountPoints            = [{ sourceVolume = "tmp", containerPath = "/tmp" }]
  }
}

# Roles: one for each process to act by, and one for each to be started by, which reads the secrets that it is given.

resource "aws_iam_role" "process" {
  for_each = local.processes

  name               = "${var.name}-${each.key}"
  assume_role_policy = local.assumed_by_tasks
  tags               = var.tags
}

resource "aws_iam_role_policy" "process" {
  for_each = merge([
    for process, about in local.processes : {
      for policy in about.policies : "${process}/${policy}" => { process = process, policy = policy }
    }
  ]...)

  name   = replace(each.value.policy, "/", "-")
  role   = aws_iam_role.process[each.value.process].id
  policy = local.policies[each.value.policy]
}

resource "aws_iam_role_policy" "database" {
  for_each = { for process, about in local.processes : process => about if about.reaches_database }

  name = "database"
  role = aws_iam_role.process[each.key].id
  policy = jsonencode({
    Version = "2012-10-17"
    Statement = [{
      Sid    = "ConnectToDatabase"
      Effect = "Allow"
      Action = ["rds-db:connect"]
      Resource = [
        for instance in concat([aws_db_instance.this], aws_db_instance.replica) :
        "arn:${data.aws_partition.current.partition}:rds-db:${data.aws_region.current.region}:${data.aws_caller_identity.current.account_id}:dbuser:${instance.resource_id}/${local.database_role}"
      ]
    }]
  })
}

resource "aws_iam_role" "start" {
  for_each = merge(local.processes, { migrate = {} })

  name               = "${var.name}-${each.key}-start"
  assume_role_policy = local.assumed_by_tasks
  tags               = var.tags
}

resource "aws_iam_role_policy_attachment" "start" {
  for_each = aws_iam_role.start

  role       = each.value.name
  policy_arn = "arn:${data.aws_partition.current.partition}:iam::aws:policy/service-role/AmazonECSTaskExecutionRolePolicy"
}

resource "aws_iam_role_policy" "start" {
  for_each = merge(
    { for process, about in local.processes : process => values(about.secrets) if length(about.secrets) > 0 },
    { migrate = [aws_secretsmanager_secret.database_owner.arn] },
  )

  name = "secrets"
  role = aws_iam_role.start[each.key].id
  policy = jsonencode({
    Version = "2012-10-17"
    Statement = [{
      Sid      = "ReadSecrets"
      Effect   = "Allow"
      Action   = ["secretsmanager:GetSecretValue"]
      Resource = each.value
    }]
  })
}

resource "aws_ecs_cluster" "this" {
  name = var.name
  tags = var.tags

  # Autoscaling divides by the number of running tasks, which is a figure of Container Insights.
  setting {
    name  = "containerInsights"
    value = "enabled"
  }
}

resource "aws_ecs_task_definition" "process" {
  for_each = local.processes

  family                   = "${var.name}-${each.key}"
  requires_compatibilities = ["FARGATE"]
  network_mode             = "awsvpc"
  cpu                      = tostring(each.value.cpu)
  memory                   = tostring(each.value.memory)
  task_role_arn            = aws_iam_role.process[each.key].arn
  execution_role_arn       = aws_iam_role.start[each.key].arn
  tags                     = var.tags

  runtime_platform {
    operating_system_family = "LINUX"
    cpu_architecture        = var.cpu_architecture
  }

  volume {
    name = "tmp"
  }

  container_definitions = jsonencode([merge(local.container, {
    name    = each.value.command[0]
    image   = each.value.image
    command = each.value.command
    # More than the grace, or what is in hand is cut off.
    stopTimeout  = each.value.grace + 10
    portMappings = [for port in each.key == "api" ? [8080, 9464] : [9464] : { containerPort = port, protocol = "tcp" }]
    environment = [
      for name, value in merge(
        local.environment,
        each.value.reaches_database ? local.process_database_environment : {},
        each.key == "api" ? {
          for replica in aws_db_instance.replica :
          "PENSTOCK_DATABASE_READ_URL" => "postgresql://${local.database_role}@${replica.address}:5432/penstock"
        } : {},
        { PENSTOCK_GRACE_SECONDS = tostring(each.value.grace) },
        each.value.environment,
      ) : { name = name, value = value }
    ]
    secrets = [for name, arn in each.value.secrets : { name = name, valueFrom = arn }]
    # Liveness: a restart does not bring a database back, so readiness is for the load balancer.
    healthCheck = {
      command     = ["CMD", "python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:9464/healthz', timeout=4)"]
      interval    = 10
      timeout     = 5
      retries     = 6
      startPeriod = 300 # the import of your modules may take minutes
    }
    logConfiguration = {
      logDriver = "awslogs"
      options = {
        awslogs-group         = aws_cloudwatch_log_group.this.name
        awslogs-region        = data.aws_region.current.region
        awslogs-stream-prefix = each.key
      }
    }
  })])
}

resource "aws_ecs_service" "process" {
  for_each = local.processes

  name                               = "${var.name}-${each.key}"
  cluster                            = aws_ecs_cluster.this.id
  task_definition                    = aws_ecs_task_definition.process[each.key].arn
  launch_type                        = "FARGATE"
  desired_count                      = each.value.count
  deployment_minimum_healthy_percent = 100
  deployment_maximum_percent         = 200
  enable_execute_command             = false
  propagate_tags                     = "SERVICE"
  tags                               = var.tags

  # Until the migration has run, the load balancer finds the api unhealthy.
  health_check_grace_period_seconds = each.key == "api" && var.certificate_arn != null ? 1800 : null

  deployment_circuit_breaker {
    enable   = true
    rollback = true
  }

  network_configuration {
    subnets         = var.subnet_ids
    security_groups = [each.value.reaches_database ? aws_security_group.processes.id : aws_security_group.workers.id]
  }

  dynamic "service_registries" {
    for_each = contains(["api", "supervisor"], each.key) ? [aws_service_discovery_service.process[each.key].arn] : []

    content {
      registry_arn = service_registries.value
    }
  }

  dynamic "load_balancer" {
    for_each = each.key == "api" ? aws_lb_target_group.api : []

    content {
      target_group_arn = load_balancer.value.arn
      container_name   = "api"
      container_port   = 8080
    }
  }

  # The autoscaler sets the number of workers, and an apply must not.
  lifecycle {
    ignore_changes = [desired_count]
  }

  depends_on = [aws_iam_role_policy.process, aws_iam_role_policy.database, aws_iam_role_policy.start, aws_iam_role_policy_attachment.start, aws_lb_listener.api]
}

# Brings the schema up to date and ends: run it before the services of a new version (output migrate_command).

resource "aws_ecs_task_definition" "migrate" {
  family                   = "${var.name}-migrate"
  requires_compatibilities = ["FARGATE"]
  network_mode             = "awsvpc"
  cpu                      = "256"
  memory                   = "512"
  execution_role_arn       = aws_iam_role.start["migrate"].arn
  tags                     = var.tags

  runtime_platform {
    operating_system_family = "LINUX"
    cpu_architecture        = var.cpu_architecture
  }

  volume {
    name = "tmp"
  }

  container_definitions = jsonencode([for container in [
    {
      # Creates the role of the processes, and ends; doing so again changes nothing.
      name        = "role"
      image       = "public.ecr.aws/docker/library/postgres:17.6-alpine"
      essential   = false
      entryPoint  = ["sh", "-c"]
      command     = ["printf '%s' \"$ROLE_SQL\" | psql --no-psqlrc --set=ON_ERROR_STOP=1 \"$OWNER_URL\""]
      environment = [{ name = "ROLE_SQL", value = file("${path.module}/role.sql") }]
      secrets = [
        { name = "OWNER_URL", valueFrom = aws_secretsmanager_secret.database_owner.arn },
      ]
    },
    {
      name        = "migrate"
      image       = var.image
      essential   = true
      command     = ["migrate", "--grant", "penstock_app"]
      dependsOn   = [{ containerName = "role", condition = "SUCCESS" }]
      environment = [for name, value in local.database_environment : { name = name, value = value }]
      secrets     = [{ name = "PENSTOCK_DATABASE_URL", valueFrom = aws_secretsmanager_secret.database_owner.arn }]
    },
    ] : merge(local.container, container, {
      logConfiguration = {
        logDriver = "awslogs"
        options = {
          awslogs-group         = aws_cloudwatch_log_group.this.name
          awslogs-region        = data.aws_region.current.region
          awslogs-stream-prefix = "migrate"
        }
      }
  })])
}
