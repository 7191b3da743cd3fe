# The whole pipeline on AWS: queues, Postgres (RDS), and every process on ECS Fargate, in a VPC that is there.

data "aws_region" "current" {}

data "aws_partition" "current" {}

data "aws_caller_identity" "current" {}

module "queues" {
  source = "../../terraform"

  name_prefix      = var.name
  routes           = { for route in keys(var.workers) : route => {} if route != "_default" }
  create_kms_key   = true
  create_dashboard = true
  alarm_topic_arns = var.alarm_topic_arns
  tags             = var.tags
}

resource "aws_cloudwatch_log_group" "this" {
  name              = "/ecs/${var.name}"
  retention_in_days = var.log_retention_days
  tags              = var.tags
}

# Who may talk to whom.

resource "aws_security_group" "processes" {
  name        = "${var.name}-processes"
  description = "Processes of ${var.name}"
  vpc_id      = var.vpc_id
  tags        = var.tags
}

resource "aws_vpc_security_group_egress_rule" "processes" {
  security_group_id = aws_security_group.processes.id
  description       = "AWS and the database"
  ip_protocol       = "-1"
  cidr_ipv4         = "0.0.0.0/0"
}

resource "aws_vpc_security_group_ingress_rule" "processes" {
  for_each = { api = 8080, metrics = 9464 }

  security_group_id            = aws_security_group.processes.id
  description                  = "Processes among themselves: ${each.key}"
  ip_protocol                  = "tcp"
  from_port                    = each.value
  to_port                      = each.value
  referenced_security_group_id = aws_security_group.processes.id
}

# Workers run your handlers: they reach the api and AWS, and not the database, whose group lets in the processes' alone.

resource "aws_security_group" "workers" {
  name        = "${var.name}-workers"
  description = "Workers of ${var.name}"
  vpc_id      = var.vpc_id
  tags        = var.tags
}

resource "aws_vpc_security_group_egress_rule" "workers" {
  security_group_id = aws_security_group.workers.id
  description       = "AWS, the api, and what handlers call"
  ip_protocol       = "-1"
  cidr_ipv4         = "0.0.0.0/0"
}

resource "aws_vpc_security_group_ingress_rule" "workers" {
  security_group_id            = aws_security_group.workers.id
  description                  = "Metrics, for the agent"
  ip_protocol                  = "tcp"
  from_port                    = 9464
  to_port                      = 9464
  referenced_security_group_id = aws_security_group.processes.id
}

resource "aws_vpc_security_group_ingress_rule" "from_workers" {
  security_group_id            = aws_security_group.processes.id
  description                  = "Workers: api"
  ip_protocol                  = "tcp"
  from_port                    = 8080
  to_port                      = 8080
  referenced_security_group_id = aws_security_group.workers.id
}

resource "aws_security_group" "database" {
  name        = "${var.name}-database"
  description = "Postgres of ${var.name}"
  vpc_id      = var.vpc_id
  tags        = var.tags
}

resource "aws_vpc_security_group_ingress_rule" "database" {
  security_group_id            = aws_security_group.database.id
  description                  = "Postgres"
  ip_protocol                  = "tcp"
  from_port                    = 5432
  to_port                      = 5432
  referenced_security_group_id = aws_security_group.processes.id
}

# Names inside the VPC: api.<name>.internal and the like.

resource "aws_service_discovery_private_dns_namespace" "this" {
  name = "${var.name}.internal"
  vpc  = var.vpc_id
  tags = var.tags
}

resource "aws_service_discovery_service" "process" {
  for_each = toset(["api", "supervisor"])

  name = each.key
  tags = var.tags

  dns_config {
    namespace_id   = aws_service_discovery_private_dns_namespace.this.id
    routing_policy = "MULTIVALUE"

    dns_records {
      type = "A"
      ttl  = 10
    }
  }
}
