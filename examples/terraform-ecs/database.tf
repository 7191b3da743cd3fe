resource "aws_db_subnet_group" "this" {
  name       = var.name
  subnet_ids = var.subnet_ids
  tags       = var.tags
}

resource "aws_db_parameter_group" "this" {
  name   = "${var.name}-postgres17"
  family = "postgres17"
  tags   = var.tags

  # TLS or nothing; and for a table of which every row changes a few times, less to write and dead rows cleared soon.
  parameter {
    name  = "rds.force_ssl"
    value = "1"
  }
  parameter {
    name  = "wal_compression"
    value = "lz4"
  }
  parameter {
    name  = "autovacuum_naptime"
    value = "10"
  }
}

resource "aws_db_instance" "this" {
  # The processes' role, which may not change the schema, signs in with tokens: see role.sql.
  iam_database_authentication_enabled = true

  identifier                   = var.name
  engine                       = "postgres"
  engine_version               = "17"
  instance_class               = var.database_instance_class
  allocated_storage            = var.database_storage_gib
  max_allocated_storage        = 4 * var.database_storage_gib
  storage_type                 = "gp3"
  storage_encrypted            = true
  kms_key_id                   = module.queues.kms_key_arn
  db_name                      = "penstock"
  username                     = "penstock"
  password_wo                  = var.database_password
  password_wo_version          = var.secrets_version
  multi_az                     = true
  db_subnet_group_name         = aws_db_subnet_group.this.name
  vpc_security_group_ids       = [aws_security_group.database.id]
  parameter_group_name         = aws_db_parameter_group.this.name
  publicly_accessible          = false
  backup_retention_period      = 14
  copy_tags_to_snapshot        = true
  deletion_protection          = true
  final_snapshot_identifier    = "${var.name}-final"
  performance_insights_enabled = true
  tags                         = var.tags
}

# For the lists, counts and long polls of the api.
resource "aws_db_instance" "replica" {
  count = var.database_replica ? 1 : 0

  iam_database_authentication_enabled = true

  identifier             = "${var.name}-replica"
  replicate_source_db    = aws_db_instance.this.identifier
  instance_class         = var.database_instance_class
  storage_encrypted      = true
  vpc_security_group_ids = [aws_security_group.database.id]
  parameter_group_name   = aws_db_parameter_group.this.name
  publicly_accessible    = false
  skip_final_snapshot    = true
  tags                   = var.tags
}

# The owner of the schema, for the migration alone.

resource "aws_secretsmanager_secret" "database_owner" {
  name = "${var.name}/database-owner"
  tags = var.tags
}

resource "aws_secretsmanager_secret_version" "database_owner" {
  secret_id                = aws_secretsmanager_secret.database_owner.id
  secret_string_wo         = "postgresql://penstock:${var.database_password}@${aws_db_instance.this.address}:5432/penstock"
  secret_string_wo_version = var.secrets_version
}

# The key that workers send, and the form of it that the api knows it by: its digest, with what it may do.

resource "aws_secretsmanager_secret" "reader_key" {
  name = "${var.name}/reader-key"
  tags = var.tags
}

resource "aws_secretsmanager_secret_version" "reader_key" {
  secret_id                = aws_secretsmanager_secret.reader_key.id
  secret_string_wo         = var.reader_key
  secret_string_wo_version = var.secrets_version
}

resource "aws_secretsmanager_secret" "api_keys" {
  name = "${var.name}/api-keys"
  tags = var.tags
}

resource "aws_secretsmanager_secret_version" "api_keys" {
  secret_id                = aws_secretsmanager_secret.api_keys.id
  secret_string_wo         = "worker:worker:${sha256(var.reader_key)}"
  secret_string_wo_version = var.secrets_version
}
