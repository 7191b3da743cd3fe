variable "name" {
  description = "Begins the names of everything made here; as a DNS name, <name>.internal is that of the processes."
  type        = string
  default     = "penstock"

  validation {
    condition     = can(regex("^[a-z][a-z0-9-]{0,27}[a-z0-9]$", var.name))
    error_message = "name must be 2 to 29 lower-case letters, digits or hyphens, and begin with a letter."
  }

  validation {
    # Of the 32 characters of a load balancer's name, "-api" takes 4.
    condition     = length(var.name) <= 28 || var.certificate_arn == null
    error_message = "name must be at most 28 characters with certificate_arn: the load balancer is called <name>-api."
  }
}

variable "vpc_id" {
  description = "The VPC to live in."
  type        = string
}

variable "subnet_ids" {
  description = "Private subnets of at least two zones, with a way to SQS, ECR, Secrets Manager and CloudWatch (NAT or endpoints)."
  type        = list(string)

  validation {
    condition     = length(var.subnet_ids) >= 2
    error_message = "subnet_ids must be two subnets or more, in different zones: RDS asks for it."
  }
}

variable "image" {
  description = "Penstock's image, built from the Dockerfile of this repository and pushed to your registry."
  type        = string
}

variable "cpu_architecture" {
  description = "What the images are built for: ARM64 or X86_64."
  type        = string
  default     = "ARM64"

  validation {
    condition     = contains(["ARM64", "X86_64"], var.cpu_architecture)
    error_message = "cpu_architecture must be ARM64 or X86_64."
  }
}

variable "workers" {
  description = "Fleets of workers by route; _default serves the tasks that go by none. app: the module with your handlers. concurrency: tasks that one runs at once. min, max: how many, by autoscaling."
  type = map(object({
    image       = string
    app         = string
    cpu         = optional(number, 512)
    memory      = optional(number, 1024)
    concurrency = optional(number, 100)
    min         = optional(number, 1)
    max         = optional(number, 20)
  }))

  validation {
    condition     = contains(keys(var.workers), "_default")
    error_message = "workers must have _default: the tasks that go by no route wait for it."
  }

  validation {
    condition     = alltrue([for fleet in values(var.workers) : fleet.min >= 1 && fleet.max > fleet.min])
    error_message = "Of each fleet, min must be 1 or more (target tracking divides by those that run) and less than max."
  }
}

variable "database_password" {
  description = "Password of the database's owner, which migrates: letters and digits, for it becomes part of a URL. Not kept in the state: TF_VAR_database_password=$(openssl rand -hex 24)"
  type        = string
  sensitive   = true
  ephemeral   = true

  validation {
    condition     = can(regex("^[0-9A-Za-z]{24,}$", var.database_password))
    error_message = "database_password must be at least 24 letters and digits."
  }
}

variable "reader_key" {
  description = "Key by which workers ask the api for cancelled tasks; may do nothing else. Not kept in the state: TF_VAR_reader_key=pstk_$(openssl rand -hex 32)"
  type        = string
  sensitive   = true
  ephemeral   = true

  validation {
    condition     = can(regex("^[0-9A-Za-z_-]{32,}$", var.reader_key))
    error_message = "reader_key must be at least 32 letters, digits, hyphens or underscores."
  }
}

variable "secrets_version" {
  description = "Raise it to write the password and the key again; then redeploy the services."
  type        = number
  default     = 1
}

variable "database_instance_class" {
  description = "Size of the database; docs/performance.md has a table by rate."
  type        = string
  default     = "db.m7g.large"
}

variable "database_storage_gib" {
  description = "Its storage; it grows automatically to four times that."
  type        = number
  default     = 100
}

variable "database_replica" {
  description = "Whether the api reads lists, counts and long polls from a replica of the database."
  type        = bool
  default     = false
}

variable "database_ssl_root_cert" {
  description = "Path, in the images, of Amazon's bundle of authorities (global-bundle.pem); with it the database's certificate is checked. Null: TLS without a check."
  type        = string
  default     = null
}

variable "certificate_arn" {
  description = "ACM certificate for an internal load balancer before the api; null makes none, and the api answers in the VPC by HTTP at api.<name>.internal:8080."
  type        = string
  default     = null
}

variable "client_security_group_ids" {
  description = "Security groups of the programs that may call the api."
  type        = list(string)
  default     = []
}

variable "alarm_topic_arns" {
  description = "SNS topics for the alarms; with none, there are no alarms."
  type        = list(string)
  default     = []
}

variable "log_retention_days" {
  description = "Logs are kept for so many days."
  type        = number
  default     = 30
}

variable "tags" {
  description = "Tags of everything."
  type        = map(string)
  default     = {}
}
