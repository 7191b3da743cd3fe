output "api_url" {
  description = "Where the api answers, inside the VPC. Of a load balancer its own name: callers use one of the certificate, which you make an alias of it."
  value       = var.certificate_arn == null ? "http://api.${aws_service_discovery_private_dns_namespace.this.name}:8080" : "https://${aws_lb.api[0].dns_name}"
}

output "migrate_command" {
  description = "Brings the schema up to date; run it after the first apply, and before the services of a new version."
  value = join(" ", [
    "aws ecs run-task --launch-type FARGATE",
    "--cluster ${aws_ecs_cluster.this.name}",
    "--task-definition ${aws_ecs_task_definition.migrate.family}",
    "--network-configuration 'awsvpcConfiguration={subnets=[${join(",", var.subnet_ids)}],securityGroups=[${aws_security_group.processes.id}]}'",
  ])
}

output "route_commands" {
  description = "Commands that create the routes; add the actions of each (docs/limits.md)."
  value       = [for route in keys(local.routes) : "penstock routes set ${route} --queue ${module.queues.queue_urls[route]} --action '${route}.*'"]
}
