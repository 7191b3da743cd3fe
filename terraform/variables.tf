variable "name_prefix" {
  description = "Queues are named <name_prefix>-inbound, -outbound, -results and -<route>; dead-letter queues end in -dlq."
  type        = string
  default     = "penstock"

  validation {
    # SQS allows 80 characters, "-outbound-dlq" takes 13 of them.
    condition     = can(regex("^[0-9A-Za-z_-]{1,67}$", var.name_prefix))
    error_message = "name_prefix must be 1 to 67 letters, digits, hyphens or underscores."
  }
}

variable "routes" {
  description = "Queues of routes by the name of the route, each with a dead-letter queue; what is left out is as the variable of the same name says."
  type = map(object({
    visibility_timeout_seconds    = optional(number)
    message_retention_seconds     = optional(number)
    dead_letter_retention_seconds = optional(number)
    max_receive_count             = optional(number)
    alarm_age_seconds             = optional(number)
    alarm_depth                   = optional(number)
  }))
  default  = {}
  nullable = false

  validation {
    condition = alltrue([
      for route in keys(var.routes) :
      can(regex("^[0-9A-Za-z_-]+$", route)) && length("${var.name_prefix}-${route}-dlq") <= 80
    ])
    error_message = "The name of a route is part of its queue's: letters, digits, hyphens and underscores, with name_prefix and -dlq at most 80."
  }

  validation {
    condition = alltrue([
      for route in keys(var.routes) :
      !contains(["inbound", "outbound", "results"], route) && !endswith(route, "-dlq")
    ])
    error_message = "A route cannot be called inbound, outbound or results, nor end in -dlq: there are queues of that name already."
  }

  validation {
    condition = alltrue(flatten([
      for given in values(var.routes) : [
        coalesce(given.visibility_timeout_seconds, 60) >= 3 && coalesce(given.visibility_timeout_seconds, 60) <= 43200,
        coalesce(given.message_retention_seconds, 60) >= 60 && coalesce(given.message_retention_seconds, 60) <= 1209600,
        coalesce(given.dead_letter_retention_seconds, 60) >= 60 && coalesce(given.dead_letter_retention_seconds, 60) <= 1209600,
        coalesce(given.max_receive_count, 1) >= 1 && coalesce(given.max_receive_count, 1) <= 1000,
        coalesce(given.alarm_age_seconds, 60) >= 60,
        coalesce(given.alarm_depth, 1) >= 1,
      ]
    ]))
    error_message = "What a route sets has the limits of the variable of the same name."
  }
}

variable "visibility_timeout_seconds" {
  description = "A received message reappears after this long unless deleted or extended; goes to PENSTOCK_VISIBILITY_TIMEOUT_SECONDS."
  type        = number
  default     = 60

  validation {
    condition     = var.visibility_timeout_seconds >= 3 && var.visibility_timeout_seconds <= 43200
    error_message = "visibility_timeout_seconds must be between 3 and 43200."
  }
}

variable "message_retention_seconds" {
  description = "The queues keep an undeleted message this long; stay below PENSTOCK_RETENTION_RECEIPTS_SECONDS (5 days by default)."
  type        = number
  default     = 345600

  validation {
    condition     = var.message_retention_seconds >= 60 && var.message_retention_seconds <= 1209600
    error_message = "message_retention_seconds must be between 60 and 1209600 (14 days)."
  }
}

variable "dead_letter_retention_seconds" {
  description = "The dead-letter queues keep a message this long, counted from its first sending; must exceed message_retention_seconds."
  type        = number
  default     = 1209600

  validation {
    condition     = var.dead_letter_retention_seconds >= 60 && var.dead_letter_retention_seconds <= 1209600
    error_message = "dead_letter_retention_seconds must be between 60 and 1209600 (14 days)."
  }
}

variable "max_receive_count" {
  description = "A message received this often without being deleted moves to its dead-letter queue."
  type        = number
  default     = 5

  validation {
    condition     = var.max_receive_count >= 1 && var.max_receive_count <= 1000 && floor(var.max_receive_count) == var.max_receive_count
    error_message = "max_receive_count must be a whole number between 1 and 1000."
  }
}

variable "kms_key_arn" {
  description = "ARN of a KMS key that is there to encrypt with; null encrypts with the key that SQS manages (SSE-SQS), which costs nothing."
  type        = string
  default     = null

  validation {
    # An alias or a key id would do for the queue, but not as the resource of the IAM statements.
    condition     = var.kms_key_arn == null || can(regex("^arn:[^:]+:kms:[^:]+:[0-9]{12}:key/.+$", var.kms_key_arn))
    error_message = "kms_key_arn must be the ARN of a key (arn:aws:kms:REGION:ACCOUNT:key/ID), not an alias or a key id."
  }
}

variable "create_kms_key" {
  description = "Make a KMS key, rotated each year, and encrypt with it; the account's IAM policies say who may use it."
  type        = bool
  default     = false
  nullable    = false

  validation {
    condition     = !(var.create_kms_key && var.kms_key_arn != null)
    error_message = "create_kms_key and kms_key_arn exclude each other: make a key, or give one."
  }
}

variable "kms_data_key_reuse_seconds" {
  description = "With an own key, SQS asks KMS for a new data key after this long; longer costs fewer calls."
  type        = number
  default     = 3600

  validation {
    condition     = var.kms_data_key_reuse_seconds >= 60 && var.kms_data_key_reuse_seconds <= 86400
    error_message = "kms_data_key_reuse_seconds must be between 60 and 86400."
  }
}

variable "kms_deletion_window_days" {
  description = "A key made here can be called back for so many days after it was destroyed."
  type        = number
  default     = 30

  validation {
    condition     = var.kms_deletion_window_days >= 7 && var.kms_deletion_window_days <= 30
    error_message = "kms_deletion_window_days must be between 7 and 30."
  }
}

variable "create_payload_bucket" {
  description = "Make a private, encrypted S3 bucket for large payloads; goes to PENSTOCK_PAYLOAD_BUCKET."
  type        = bool
  default     = false
  nullable    = false
}

variable "payload_bucket_name" {
  description = "Name of that bucket; null names it <name_prefix>-payloads-<account>-<region>."
  type        = string
  default     = null

  validation {
    condition     = var.payload_bucket_name == null || can(regex("^[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]$", var.payload_bucket_name))
    error_message = "payload_bucket_name must be 3 to 63 lower-case letters, digits, dots or hyphens, as S3 has it."
  }
}

variable "payload_expiration_days" {
  description = "Objects older than this are removed whatever became of their task; null keeps them until Penstock removes them. Longer than any task waits and is kept."
  type        = number
  default     = null

  validation {
    condition     = var.payload_expiration_days == null || try(var.payload_expiration_days >= 30, false)
    error_message = "payload_expiration_days must be at least 30: a task that waits would find its payload gone."
  }
}

variable "worker_payload_prefixes" {
  description = "Prefixes of objects that workers may read besides those of their own queue, by the route, or outbound: { video = [\"queues/penstock-outbound/\"] } while tasks wait that were stored before the route was made."
  type        = map(list(string))
  default     = {}
  nullable    = false

  validation {
    condition     = length(setsubtract(keys(var.worker_payload_prefixes), concat(["outbound"], keys(var.routes)))) == 0
    error_message = "worker_payload_prefixes is by outbound and the names of routes."
  }

  validation {
    condition = alltrue([
      for prefix in flatten(values(var.worker_payload_prefixes)) :
      can(regex("^(queues/[^/*?$]+/|2[0-9]*)$", prefix))
    ])
    error_message = "worker_payload_prefixes must be folders of queues (queues/NAME/), or the beginning of a day (2026) for objects of earlier versions, without wildcards."
  }
}

variable "sqs_send_queue_arns" {
  description = "ARNs of the queues that workers send to as PENSTOCK_SQS_SEND_QUEUES allows (the action sqs.send)."
  type        = list(string)
  default     = []
  nullable    = false

  validation {
    condition     = alltrue([for arn in var.sqs_send_queue_arns : can(regex("^arn:[^:]+:sqs:[^:]+:[0-9]{12}:[^:*]+$", arn))])
    error_message = "sqs_send_queue_arns must be ARNs of queues (arn:aws:sqs:REGION:ACCOUNT:NAME), without wildcards."
  }
}

variable "alarm_topic_arns" {
  description = "SNS topics that the CloudWatch alarms notify; with none, no alarm is created."
  type        = list(string)
  default     = []
  nullable    = false

  validation {
    condition     = alltrue([for arn in var.alarm_topic_arns : can(regex("^arn:[^:]+:sns:[^:]+:[0-9]{12}:.+$", arn))])
    error_message = "alarm_topic_arns must be ARNs of SNS topics (arn:aws:sns:REGION:ACCOUNT:NAME)."
  }
}

variable "alarm_age_seconds" {
  description = "Alarm on a queue whose oldest message is older than this. One that a worker holds counts too: longer than a task runs."
  type        = number
  default     = 900

  validation {
    condition     = var.alarm_age_seconds >= 60
    error_message = "alarm_age_seconds must be at least 60, the resolution of the metric."
  }
}

variable "alarm_depth" {
  description = "A queue in which more messages than this wait raises an alarm; one message may hold hundreds of tasks."
  type        = number
  default     = 10000

  validation {
    condition     = var.alarm_depth >= 1
    error_message = "alarm_depth must be at least 1."
  }
}

variable "create_dashboard" {
  description = "Make a CloudWatch dashboard of the queues."
  type        = bool
  default     = false
  nullable    = false
}

variable "tags" {
  description = "Tags of every queue, alarm, key and bucket."
  type        = map(string)
  default     = {}
}
