# Who may do what. Batch itself uses its service-linked role.

locals {
  objects = "${aws_s3_bucket.runs.arn}/${var.prefix}/*"
}

# The machines: they join the cluster that Batch makes.
data "aws_iam_policy_document" "machine_trust" {
  statement {
    actions = ["sts:AssumeRole"]
    principals {
      type        = "Service"
      identifiers = ["ec2.amazonaws.com"]
    }
  }
}

resource "aws_iam_role" "machine" {
  name               = "${var.name}-machine"
  assume_role_policy = data.aws_iam_policy_document.machine_trust.json
}

resource "aws_iam_role_policy_attachment" "machine" {
  role       = aws_iam_role.machine.name
  policy_arn = "arn:${local.partition}:iam::aws:policy/service-role/AmazonEC2ContainerServiceforEC2Role"
}

resource "aws_iam_instance_profile" "machine" {
  name = "${var.name}-machine"
  role = aws_iam_role.machine.name
}

# Jobs: what starts them (execution), and what they are themselves (job).
data "aws_iam_policy_document" "job_trust" {
  statement {
    actions = ["sts:AssumeRole"]
    principals {
      type        = "Service"
      identifiers = ["ecs-tasks.amazonaws.com"]
    }
    condition {
      test     = "StringEquals"
      variable = "aws:SourceAccount"
      values   = [local.account]
    }
  }
}

data "aws_iam_policy_document" "execution" {
  #checkov:skip=CKV_AWS_356:ecr:GetAuthorizationToken knows no resource.
  statement {
    sid       = "SignInToTheRegistry"
    actions   = ["ecr:GetAuthorizationToken"]
    resources = ["*"]
  }
  statement {
    sid       = "PullTheImage"
    actions   = ["ecr:BatchCheckLayerAvailability", "ecr:BatchGetImage", "ecr:GetDownloadUrlForLayer"]
    resources = [aws_ecr_repository.images.arn]
  }
  statement {
    sid       = "WriteLogs"
    actions   = ["logs:CreateLogStream", "logs:PutLogEvents"]
    resources = ["${aws_cloudwatch_log_group.jobs.arn}:*"]
  }
  dynamic "statement" {
    for_each = length(var.secrets) == 0 ? [] : [values(var.secrets)]
    content {
      sid       = "ReadTheSecretsOfJobs"
      actions   = ["secretsmanager:GetSecretValue"]
      resources = statement.value
    }
  }
}

resource "aws_iam_role" "execution" {
  name               = "${var.name}-execution"
  assume_role_policy = data.aws_iam_policy_document.job_trust.json
}

resource "aws_iam_role_policy" "execution" {
  name   = "start-jobs"
  role   = aws_iam_role.execution.id
  policy = data.aws_iam_policy_document.execution.json
}

data "aws_iam_policy_document" "runs" {
  statement {
    sid       = "Runs"
    actions   = ["s3:GetObject", "s3:PutObject", "s3:DeleteObject", "s3:AbortMultipartUpload"]
    resources = [local.objects]
  }
  statement {
    sid       = "ListRuns"
    actions   = ["s3:ListBucket"]
    resources = [aws_s3_bucket.runs.arn]
    condition {
      test     = "StringLike"
      variable = "s3:prefix"
      values   = ["${var.prefix}/*"]
    }
  }
}

data "aws_iam_policy_document" "job" {
  source_policy_documents = [data.aws_iam_policy_document.runs.json]
  dynamic "statement" {
    for_each = var.efs_file_system_id == "" ? [] : [var.efs_file_system_id]
    content {
      sid       = "SharedFolder"
      actions   = ["elasticfilesystem:ClientMount", "elasticfilesystem:ClientWrite"]
      resources = ["arn:${local.partition}:elasticfilesystem:${var.region}:${local.account}:file-system/${statement.value}"]
    }
  }
}

resource "aws_iam_role" "job" {
  name               = "${var.name}-job"
  assume_role_policy = data.aws_iam_policy_document.job_trust.json
}

resource "aws_iam_role_policy" "job" {
  name   = "runs"
  role   = aws_iam_role.job.id
  policy = data.aws_iam_policy_document.job.json
}

# People: attach this policy to whoever submits experiments.
data "aws_iam_policy_document" "submit" {
  #checkov:skip=CKV_AWS_356:Questions to Batch, EC2 and the price list know no resource; they change nothing.
  source_policy_documents = [data.aws_iam_policy_document.runs.json]
  statement {
    sid     = "Submit"
    actions = ["batch:SubmitJob"]
    resources = concat(
      [for queue in aws_batch_job_queue.main : queue.arn],
      [for definition in aws_batch_job_definition.main : definition.arn_prefix],
      [for definition in aws_batch_job_definition.main : "${definition.arn_prefix}:*"],
    )
  }
  statement {
    sid       = "EndJobs"
    actions   = ["batch:CancelJob", "batch:TerminateJob"]
    resources = ["arn:${local.partition}:batch:${var.region}:${local.account}:job/*"]
  }
  statement {
    sid = "Look"
    actions = [
      "batch:DescribeComputeEnvironments", "batch:DescribeJobDefinitions", "batch:DescribeJobQueues",
      "batch:DescribeJobs", "batch:ListJobs", "ec2:DescribeInstanceTypes", "ec2:DescribeSpotPriceHistory",
      "pricing:GetProducts",
    ]
    resources = ["*"]
  }
  statement {
    sid       = "ReadLogs"
    actions   = ["logs:GetLogEvents", "logs:FilterLogEvents"]
    resources = ["${aws_cloudwatch_log_group.jobs.arn}:*"]
  }
}

resource "aws_iam_policy" "submit" {
  name        = "${var.name}-submit"
  description = "Submit experiments, follow and end them, and fetch their runs"
  policy      = data.aws_iam_policy_document.submit.json
}
