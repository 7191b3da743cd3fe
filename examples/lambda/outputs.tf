output "route_command" {
  description = "Registers the route with the schedulers: tasks of the actions named at its end go to the function."
  value       = "penstock routes set lambda --queue ${module.queues.queue_urls["lambda"]} --action"
}

output "settings" {
  description = "Environment of the other processes; add PENSTOCK_DATABASE_URL."
  value       = module.queues.settings
}
