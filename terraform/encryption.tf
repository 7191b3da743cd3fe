locals {
  # Known before anything exists, as the ARN of a key of our own is not.
  own_key = var.create_kms_key || var.kms_key_arn != null
  key_arn = var.create_kms_key ? aws_kms_key.this[0].arn : var.kms_key_arn
}

resource "aws_kms_key" "this" {
  count = var.create_kms_key ? 1 : 0

  description             = "Messages and payloads of ${var.name_prefix}"
  enable_key_rotation     = true
  deletion_window_in_days = var.kms_deletion_window_days
  tags                    = var.tags

  # The account's IAM policies decide, among them those of this module.
  policy = jsonencode({
    Version = "2012-10-17"
    Statement = [{
      Sid       = "LetPoliciesOfTheAccountDecide"
      Effect    = "Allow"
      Principal = { AWS = "arn:${data.aws_partition.current.partition}:iam::${data.aws_caller_identity.current.account_id}:root" }
      Action    = "kms:*"
      Resource  = "*"
    }]
  })
}

resource "aws_kms_alias" "this" {
  count = var.create_kms_key ? 1 : 0

  name          = "alias/${var.name_prefix}"
  target_key_id = aws_kms_key.this[0].key_id
}
