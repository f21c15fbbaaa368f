output "repository_url" {
  description = "Where images are pushed: docker push <this>:<image_tag>-cpu."
  value       = aws_ecr_repository.images.repository_url
}

output "bucket" {
  description = "--bucket of submit_exp."
  value       = aws_s3_bucket.runs.bucket
}

output "prefix" {
  description = "--prefix of submit_exp."
  value       = var.prefix
}

output "region" {
  description = "AWS_DEFAULT_REGION of commands."
  value       = var.region
}

output "job_queues" {
  description = "--queue of submit_exp, --aws-job-queue of the benchmark runner."
  value       = { for kind, queue in aws_batch_job_queue.main : kind => queue.name }
}

output "job_definitions" {
  description = "--definition of submit_exp, --aws-job-definition of the benchmark runner."
  value       = { for kind, definition in aws_batch_job_definition.main : kind => definition.name }
}

output "workdir" {
  description = "Where jobs see the shared file system, for --aws-workdir of the benchmark runner; empty without one."
  value       = var.efs_file_system_id == "" ? "" : "/mnt/cleanrl"
}

output "log_group" {
  description = "Of the jobs, in CloudWatch."
  value       = aws_cloudwatch_log_group.jobs.name
}

output "submit_policy_arn" {
  description = "The policy for people who submit experiments."
  value       = aws_iam_policy.submit.arn
}
