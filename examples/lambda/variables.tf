variable "name_prefix" {
  description = "Prefix of the queues and of the function."
  type        = string
  default     = "penstock"
}

variable "package" {
  description = "Path of a zip file with your handlers and penstock[lambda], as README.md makes it."
  type        = string
}

variable "handler" {
  description = "Your module and lambda_handler, which it imports from penstock."
  type        = string
  default     = "shop.lambda_handler"
}

variable "timeout_seconds" {
  description = "How long an invocation may take; handlers are stopped 3 seconds earlier."
  type        = number
  default     = 60

  validation {
    condition     = var.timeout_seconds >= 10 && var.timeout_seconds <= 900
    error_message = "timeout_seconds must be between 10 and 900, the most that Lambda gives."
  }
}

variable "memory_megabytes" {
  description = "Memory of an execution environment, which also decides its share of a CPU."
  type        = number
  default     = 512
}

variable "maximum_concurrency" {
  description = "How many invocations may run at once."
  type        = number
  default     = 20
}

variable "environment" {
  description = "More variables, such as PENSTOCK_LOG_LEVEL, or what your handlers need."
  type        = map(string)
  default     = {}
}
