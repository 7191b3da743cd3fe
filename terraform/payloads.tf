locals {
  payload_buckets      = var.create_payload_bucket ? { payloads = coalesce(var.payload_bucket_name, local.payload_bucket_named) } : {}
  payload_bucket_named = "${lower(replace(var.name_prefix, "_", "-"))}-payloads-${data.aws_caller_identity.current.account_id}-${data.aws_region.current.region}"
}

resource "aws_s3_bucket" "payloads" {
  for_each = local.payload_buckets

  bucket = each.value
  tags   = var.tags
}

resource "aws_s3_bucket_public_access_block" "payloads" {
  for_each = local.payload_buckets

  bucket                  = aws_s3_bucket.payloads[each.key].id
  block_public_acls       = true
  block_public_policy     = true
  ignore_public_acls      = true
  restrict_public_buckets = true
}

resource "aws_s3_bucket_ownership_controls" "payloads" {
  for_each = local.payload_buckets

  bucket = aws_s3_bucket.payloads[each.key].id

  rule {
    object_ownership = "BucketOwnerEnforced"
  }
}

resource "aws_s3_bucket_server_side_encryption_configuration" "payloads" {
  for_each = local.payload_buckets

  bucket = aws_s3_bucket.payloads[each.key].id

  rule {
    # With an own key, one call of KMS serves many objects.
    bucket_key_enabled = local.own_key

    apply_server_side_encryption_by_default {
      sse_algorithm     = local.own_key ? "aws:kms" : "AES256"
      kms_master_key_id = local.key_arn
    }
  }
}

resource "aws_s3_bucket_lifecycle_configuration" "payloads" {
  for_each = local.payload_buckets

  bucket = aws_s3_bucket.payloads[each.key].id

  rule {
    id     = "abort-uploads"
    status = "Enabled"

    filter {}

    abort_incomplete_multipart_upload {
      days_after_initiation = 1
    }
  }

  dynamic "rule" {
    for_each = var.payload_expiration_days == null ? [] : [var.payload_expiration_days]

    content {
      id     = "expire-orphans"
      status = "Enabled"

      filter {}

      expiration {
        days = rule.value
      }
    }
  }
}

resource "aws_s3_bucket_policy" "payloads" {
  for_each = local.payload_buckets

  bucket = aws_s3_bucket.payloads[each.key].id
  policy = jsonencode({
    Version = "2012-10-17"
    Statement = [
      {
        Sid       = "DenyInsecureTransport"
        Effect    = "Deny"
        Principal = "*"
        Action    = "s3:*"
        Resource  = [aws_s3_bucket.payloads[each.key].arn, "${aws_s3_bucket.payloads[each.key].arn}/*"]
        Condition = { Bool = { "aws:SecureTransport" = "false" } }
      },
      {
        # Every object has a new name. The second condition leaves out the parts of an upload, which have no such header.
        Sid       = "DenyOverwriting"
        Effect    = "Deny"
        Principal = "*"
        Action    = "s3:PutObject"
        Resource  = ["${aws_s3_bucket.payloads[each.key].arn}/*"]
        Condition = {
          Null = { "s3:if-none-match" = "true" }
          Bool = { "s3:ObjectCreationOperation" = "true" }
        }
      },
    ]
  })

  # S3 refuses a second change of a bucket's settings while a first is under way.
  depends_on = [aws_s3_bucket_public_access_block.payloads]
}
