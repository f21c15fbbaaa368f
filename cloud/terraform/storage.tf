# The images, the bucket for runs, and the logs.

resource "aws_ecr_repository" "images" {
  #checkov:skip=CKV_AWS_136:Encrypted with a key of AWS; one of our own costs money by the month.
  name                 = var.name
  image_tag_mutability = "IMMUTABLE"
  force_delete         = false
  image_scanning_configuration {
    scan_on_push = true
  }
  encryption_configuration {
    encryption_type = "AES256"
  }
}

resource "aws_ecr_lifecycle_policy" "images" {
  repository = aws_ecr_repository.images.name
  policy = jsonencode({
    rules = [{
      rulePriority = 1
      description  = "Images without a tag"
      selection    = { tagStatus = "untagged", countType = "sinceImagePushed", countUnit = "days", countNumber = 7 }
      action       = { type = "expire" }
    }]
  })
}

resource "aws_s3_bucket" "runs" {
  #checkov:skip=CKV_AWS_18:A log of every access would be a second bucket, for data that only the account can read.
  #checkov:skip=CKV_AWS_21:Files are never overwritten; old versions would be a state a minute and every old checkpoint.
  #checkov:skip=CKV_AWS_144:Runs can be repeated from their command and commit: no copy in a second region.
  #checkov:skip=CKV_AWS_145:Encrypted with a key of AWS; one of our own costs money by the month.
  #checkov:skip=CKV2_AWS_62:Nothing listens to events of the bucket.
  bucket        = var.bucket
  force_destroy = false
}

resource "aws_s3_bucket_ownership_controls" "runs" {
  bucket = aws_s3_bucket.runs.id
  rule {
    object_ownership = "BucketOwnerEnforced"
  }
}

resource "aws_s3_bucket_public_access_block" "runs" {
  bucket                  = aws_s3_bucket.runs.id
  block_public_acls       = true
  block_public_policy     = true
  ignore_public_acls      = true
  restrict_public_buckets = true
}

resource "aws_s3_bucket_server_side_encryption_configuration" "runs" {
  bucket = aws_s3_bucket.runs.id
  rule {
    apply_server_side_encryption_by_default {
      sse_algorithm = "AES256"
    }
  }
}

# What a worker that was killed could not finish to send.
resource "aws_s3_bucket_lifecycle_configuration" "runs" {
  bucket = aws_s3_bucket.runs.id
  rule {
    id     = "unfinished-uploads"
    status = "Enabled"
    filter {}
    abort_incomplete_multipart_upload {
      days_after_initiation = 2
    }
  }
}

data "aws_iam_policy_document" "bucket" {
  statement {
    sid       = "OnlyTLS"
    effect    = "Deny"
    actions   = ["s3:*"]
    resources = [aws_s3_bucket.runs.arn, "${aws_s3_bucket.runs.arn}/*"]
    principals {
      type        = "*"
      identifiers = ["*"]
    }
    condition {
      test     = "Bool"
      variable = "aws:SecureTransport"
      values   = ["false"]
    }
  }
}

resource "aws_s3_bucket_policy" "runs" {
  depends_on = [aws_s3_bucket_public_access_block.runs]
  bucket     = aws_s3_bucket.runs.id
  policy     = data.aws_iam_policy_document.bucket.json
}

resource "aws_cloudwatch_log_group" "jobs" {
  #checkov:skip=CKV_AWS_338:What a run prints is in its folder, too; a year of it here helps nobody.
  #checkov:skip=CKV_AWS_158:Encrypted with a key of AWS; one of our own costs money by the month.
  name              = "/aws/batch/${var.name}"
  retention_in_days = var.log_days
}

resource "aws_budgets_budget" "monthly" {
  count        = var.budget == null ? 0 : 1
  name         = "${var.name}-monthly"
  budget_type  = "COST"
  limit_amount = tostring(var.budget.limit)
  limit_unit   = "USD"
  time_unit    = "MONTHLY"
  cost_filter {
    name   = "TagKeyValue"
    values = [format("user:Project$%s", var.name)]
  }
  notification {
    comparison_operator        = "GREATER_THAN"
    notification_type          = "ACTUAL"
    threshold                  = 80
    threshold_type             = "PERCENTAGE"
    subscriber_email_addresses = [var.budget.email]
  }
  notification {
    comparison_operator        = "GREATER_THAN"
    notification_type          = "FORECASTED"
    threshold                  = 100
    threshold_type             = "PERCENTAGE"
    subscriber_email_addresses = [var.budget.email]
  }
}
