# Workers follow the handlers that have to run at once (docs/autoscaling.md): the supervisor exports them as a metric, the
# CloudWatch agent hands it on, and each fleet tracks what its own route asks for.

module "scaling" {
  source   = "../autoscaling"
  for_each = var.workers

  cluster          = aws_ecs_cluster.this.name
  service          = aws_ecs_service.process[each.key == "_default" ? "worker" : "worker-${each.key}"].name
  route            = each.key
  slots_per_worker = 0.7 * each.value.concurrency
  min_workers      = each.value.min
  max_workers      = each.value.max
}

resource "aws_iam_role" "agent" {
  name               = "${var.name}-agent"
  assume_role_policy = local.assumed_by_tasks
  tags               = var.tags
}

resource "aws_iam_role" "agent_start" {
  name               = "${var.name}-agent-start"
  assume_role_policy = local.assumed_by_tasks
  tags               = var.tags
}

resource "aws_iam_role_policy_attachment" "agent" {
  role       = aws_iam_role.agent.name
  policy_arn = "arn:${data.aws_partition.current.partition}:iam::aws:policy/CloudWatchAgentServerPolicy"
}

resource "aws_iam_role_policy_attachment" "agent_start" {
  role       = aws_iam_role.agent_start.name
  policy_arn = "arn:${data.aws_partition.current.partition}:iam::aws:policy/service-role/AmazonECSTaskExecutionRolePolicy"
}

resource "aws_ecs_task_definition" "agent" {
  family                   = "${var.name}-agent"
  requires_compatibilities = ["FARGATE"]
  network_mode             = "awsvpc"
  cpu                      = "256"
  memory                   = "512"
  task_role_arn            = aws_iam_role.agent.arn
  execution_role_arn       = aws_iam_role.agent_start.arn
  tags                     = var.tags

  container_definitions = jsonencode([{
    name      = "agent"
    image     = "public.ecr.aws/cloudwatch-agent/cloudwatch-agent:latest"
    essential = true
    environment = [
      {
        name = "CW_CONFIG_CONTENT"
        value = replace(
          file("${path.module}/../autoscaling/cloudwatch-agent.json"),
          "/etc/penstock/cloudwatch-prometheus.yaml",
          "env:PROMETHEUS_CONFIG_CONTENT",
        )
      },
      {
        name = "PROMETHEUS_CONFIG_CONTENT"
        value = replace(
          file("${path.module}/../autoscaling/cloudwatch-prometheus.yaml"),
          "supervisor.penstock.internal",
          "supervisor.${aws_service_discovery_private_dns_namespace.this.name}",
        )
      },
    ]
    logConfiguration = {
      logDriver = "awslogs"
      options = {
        awslogs-group         = aws_cloudwatch_log_group.this.name
        awslogs-region        = data.aws_region.current.region
        awslogs-stream-prefix = "agent"
      }
    }
  }])
}

resource "aws_ecs_service" "agent" {
  name            = "${var.name}-agent"
  cluster         = aws_ecs_cluster.this.id
  task_definition = aws_ecs_task_definition.agent.arn
  launch_type     = "FARGATE"
  desired_count   = 1
  tags            = var.tags

  network_configuration {
    subnets         = var.subnet_ids
    security_groups = [aws_security_group.processes.id]
  }
}
