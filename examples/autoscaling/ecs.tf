# ECS: workers track the handlers that have to run at once, by target tracking on a metric of CloudWatch.
#
# The CloudWatch agent (cloudwatch-agent.json, cloudwatch-prometheus.yaml beside this) scrapes the supervisor and writes
# penstock_scaling_slots into the namespace Penstock. The figure must fall as workers are added, so it is divided by
# those that run; that needs Container Insights. One worker always runs: by nothing, no figure can be divided.

variable "cluster" {
  description = "Name of the ECS cluster."
  type        = string
}

variable "service" {
  description = "Name of the ECS service of the workers."
  type        = string
  default     = "penstock-worker"
}

variable "route" {
  description = "Route that these workers serve; _default for the outbound queue."
  type        = string
  default     = "_default"
}

variable "slots_per_worker" {
  description = "Handlers that one worker should run at once: 70 % of PENSTOCK_WORKER_CONCURRENCY."
  type        = number
  default     = 70
}

variable "min_workers" {
  description = "Never fewer; 1 at least."
  type        = number
  default     = 1
}

variable "max_workers" {
  description = "Never more."
  type        = number
  default     = 20
}

resource "aws_appautoscaling_target" "worker" {
  service_namespace  = "ecs"
  scalable_dimension = "ecs:service:DesiredCount"
  resource_id        = "service/${var.cluster}/${var.service}"
  min_capacity       = var.min_workers
  max_capacity       = var.max_workers
}

resource "aws_appautoscaling_policy" "worker" {
  name               = "${var.service}-slots"
  policy_type        = "TargetTrackingScaling"
  service_namespace  = aws_appautoscaling_target.worker.service_namespace
  scalable_dimension = aws_appautoscaling_target.worker.scalable_dimension
  resource_id        = aws_appautoscaling_target.worker.resource_id

  target_tracking_scaling_policy_configuration {
    target_value       = var.slots_per_worker
    scale_out_cooldown = 60
    scale_in_cooldown  = 300

    customized_metric_specification {
      metrics {
        id          = "slots"
        return_data = false
        metric_stat {
          stat = "Maximum"
          metric {
            namespace   = "Penstock"
            metric_name = "penstock_scaling_slots"
            dimensions {
              name  = "route"
              value = var.route
            }
          }
        }
      }

      metrics {
        id          = "running"
        return_data = false
        metric_stat {
          stat = "Average"
          metric {
            namespace   = "ECS/ContainerInsights"
            metric_name = "RunningTaskCount"
            dimensions {
              name  = "ClusterName"
              value = var.cluster
            }
            dimensions {
              name  = "ServiceName"
              value = var.service
            }
          }
        }
      }

      metrics {
        id          = "slots_per_worker"
        expression  = "slots / running"
        return_data = true
      }
    }
  }
}
