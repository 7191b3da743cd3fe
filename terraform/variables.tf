variable "name_prefix" {
  description = "Queues are named <name_prefix>-inbound, -outbound and -results; dead-letter queues end in -dlq."
  type        = string
  default     = "penstock"

  validation {
    # SQS allows 80 characters, "-outbound-dlq" takes 13 of them.
    condition     = can(regex("^[0-9A-Za-z_-]{1,67}$", var.name_prefix))
    error_message = "name_prefix must be 1 to 67 letters, digits, hyphens or underscores."
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
  description = "The three queues keep an undeleted message this long; stay below PENSTOCK_RETENTION_RECEIPTS_SECONDS (5 days by default)."
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
  description = "ARN of an own KMS key to encrypt with; null encrypts with the key that SQS manages (SSE-SQS), which costs nothing."
  type        = string
  default     = null

  validation {
    # An alias or a key id would do for the queue, but not as the resource of the IAM statements.
    condition     = var.kms_key_arn == null || can(regex("^arn:[^:]+:kms:[^:]+:[0-9]{12}:key/.+$", var.kms_key_arn))
    error_message = "kms_key_arn must be the ARN of a key (arn:aws:kms:REGION:ACCOUNT:key/ID), not an alias or a key id."
  }
}

variable "alarm_topic_arns" {
  description = "SNS topics that the CloudWatch alarms notify; with none, no alarm is created."
  type        = list(string)
  default     = []
}

variable "alarm_age_seconds" {
  description = "A queue whose oldest message is older than this raises an alarm: nobody takes its messages."
  type        = number
  default     = 900

  validation {
    condition     = var.alarm_age_seconds >= 60
    error_message = "alarm_age_seconds must be at least 60, the resolution of the metric."
  }
}

variable "tags" {
  description = "Tags of every queue and alarm."
  type        = map(string)
  default     = {}
}
