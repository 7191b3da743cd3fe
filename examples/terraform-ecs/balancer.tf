# Before the api, for those who have a certificate: inside the VPC, and for whom client_security_group_ids names.

resource "aws_security_group" "balancer" {
  count = var.certificate_arn == null ? 0 : 1

  name        = "${var.name}-balancer"
  description = "Load balancer of ${var.name}"
  vpc_id      = var.vpc_id
  tags        = var.tags
}

resource "aws_vpc_security_group_ingress_rule" "balancer" {
  for_each = var.certificate_arn == null ? toset([]) : toset(var.client_security_group_ids)

  security_group_id            = aws_security_group.balancer[0].id
  description                  = "Callers of the api"
  ip_protocol                  = "tcp"
  from_port                    = 443
  to_port                      = 443
  referenced_security_group_id = each.value
}

resource "aws_vpc_security_group_egress_rule" "balancer" {
  for_each = var.certificate_arn == null ? {} : { api = 8080, metrics = 9464 }

  security_group_id            = aws_security_group.balancer[0].id
  description                  = "To the processes: ${each.key}"
  ip_protocol                  = "tcp"
  from_port                    = each.value
  to_port                      = each.value
  referenced_security_group_id = aws_security_group.processes.id
}

resource "aws_vpc_security_group_ingress_rule" "from_balancer" {
  for_each = var.certificate_arn == null ? {} : { api = 8080, metrics = 9464 }

  security_group_id            = aws_security_group.processes.id
  description                  = "Load balancer: ${each.key}"
  ip_protocol                  = "tcp"
  from_port                    = each.value
  to_port                      = each.value
  referenced_security_group_id = aws_security_group.balancer[0].id
}

# Without a load balancer, callers come to the api itself.
resource "aws_vpc_security_group_ingress_rule" "callers" {
  for_each = var.certificate_arn == null ? toset(var.client_security_group_ids) : toset([])

  security_group_id            = aws_security_group.processes.id
  description                  = "Callers of the api"
  ip_protocol                  = "tcp"
  from_port                    = 8080
  to_port                      = 8080
  referenced_security_group_id = each.value
}

resource "aws_lb" "api" {
  count = var.certificate_arn == null ? 0 : 1

  name                       = "${var.name}-api"
  internal                   = true
  load_balancer_type         = "application"
  subnets                    = var.subnet_ids
  security_groups            = [aws_security_group.balancer[0].id]
  drop_invalid_header_fields = true
  tags                       = var.tags

  # A call of `result` waits for up to a minute for its task, and the dashboard's stream lives on.
  idle_timeout = 120
}

resource "aws_lb_target_group" "api" {
  count = var.certificate_arn == null ? 0 : 1

  name                 = "${var.name}-api"
  port                 = 8080
  protocol             = "HTTP"
  target_type          = "ip"
  vpc_id               = var.vpc_id
  deregistration_delay = "30"
  tags                 = var.tags

  # ECS replaces an api that this finds unhealthy, which brings no database back: an outage of five minutes passes first.
  health_check {
    port                = "9464"
    path                = "/readyz"
    matcher             = "200"
    interval            = 30
    timeout             = 5
    healthy_threshold   = 2
    unhealthy_threshold = 10
  }
}

resource "aws_lb_listener" "api" {
  count = var.certificate_arn == null ? 0 : 1

  load_balancer_arn = aws_lb.api[0].arn
  port              = 443
  protocol          = "HTTPS"
  ssl_policy        = "ELBSecurityPolicy-TLS13-1-2-2021-06"
  certificate_arn   = var.certificate_arn
  tags              = var.tags

  default_action {
    type             = "forward"
    target_group_arn = aws_lb_target_group.api[0].arn
  }
}
