# Compute environments and queues (on demand and Spot, for CPUs and GPUs), and what a job is by default.

locals {
  kinds = merge(
    {
      "on-demand" = { type = "EC2", gpu = false }
      "spot"      = { type = "SPOT", gpu = false }
    },
    var.max_gpu_vcpus == 0 ? {} : {
      "on-demand-gpu" = { type = "EC2", gpu = true }
      "spot-gpu"      = { type = "SPOT", gpu = true }
    },
  )

  definitions = merge(
    {
      cpu = {
        image         = "${aws_ecr_repository.images.repository_url}:${var.image_tag}-cpu"
        shared_memory = var.job.shared_memory
        resources     = { VCPU = var.job.vcpus, MEMORY = var.job.memory }
      }
    },
    var.max_gpu_vcpus == 0 ? {} : {
      gpu = {
        image         = "${aws_ecr_repository.images.repository_url}:${var.image_tag}-cuda"
        shared_memory = var.job.gpu_shared_memory
        resources     = { VCPU = var.job.gpu_vcpus, MEMORY = var.job.gpu_memory, GPU = 1 }
      }
    },
  )

  # The agent of ECS: SIGTERM to the jobs of a Spot machine as soon as it is to be taken away, two minutes before, and
  # most of that time for a checkpoint.
  user_data = <<-EOT
    MIME-Version: 1.0
    Content-Type: multipart/mixed; boundary="==BOUNDARY=="

    --==BOUNDARY==
    Content-Type: text/x-shellscript; charset="us-ascii"

    #!/bin/sh
    echo ECS_ENABLE_SPOT_INSTANCE_DRAINING=true >> /etc/ecs/ecs.config
    echo ECS_CONTAINER_STOP_TIMEOUT=100s >> /etc/ecs/ecs.config

    --==BOUNDARY==--
  EOT
}

resource "aws_launch_template" "machine" {
  #checkov:skip=CKV_AWS_341:Two hops let a job in its container see that its Spot machine will be taken away.
  name                   = "${var.name}-machine"
  update_default_version = true
  user_data              = base64encode(local.user_data)
  metadata_options {
    http_endpoint               = "enabled"
    http_tokens                 = "required"
    http_put_response_hop_limit = 2
  }
  block_device_mappings {
    device_name = "/dev/xvda"
    ebs {
      volume_size           = var.disk_gb
      volume_type           = "gp3"
      encrypted             = true
      delete_on_termination = true
    }
  }
  tag_specifications {
    resource_type = "volume"
    tags          = { Project = var.name }
  }
}

resource "aws_batch_compute_environment" "main" {
  for_each   = local.kinds
  depends_on = [aws_iam_role_policy_attachment.machine]
  # a change that needs a new environment makes it before the queue lets go of the old one
  name_prefix = "${var.name}-${each.key}-"
  type        = "MANAGED"
  state       = "ENABLED"
  compute_resources {
    type                = each.value.type
    allocation_strategy = each.value.type == "SPOT" ? "SPOT_PRICE_CAPACITY_OPTIMIZED" : "BEST_FIT_PROGRESSIVE"
    min_vcpus           = 0
    desired_vcpus       = 0
    max_vcpus           = each.value.gpu ? var.max_gpu_vcpus : var.max_vcpus
    instance_type       = each.value.gpu ? var.gpu_instance_types : var.instance_types
    instance_role       = aws_iam_instance_profile.machine.arn
    subnets             = local.subnet_ids
    security_group_ids  = [aws_security_group.machines.id]
    tags                = { Name = "${var.name}-${each.key}", Project = var.name }
    ec2_configuration {
      image_type = each.value.gpu ? "ECS_AL2023_NVIDIA" : "ECS_AL2023"
    }
    launch_template {
      launch_template_id = aws_launch_template.machine.id
      version            = aws_launch_template.machine.latest_version
    }
  }
  update_policy {
    job_execution_timeout_minutes = 30
    terminate_jobs_on_update      = false
  }
  lifecycle {
    create_before_destroy = true
    ignore_changes        = [compute_resources[0].desired_vcpus] # Batch moves it
  }
}

resource "aws_batch_job_queue" "main" {
  for_each = local.kinds
  name     = "${var.name}-${each.key}"
  state    = "ENABLED"
  priority = 1
  compute_environment_order {
    order               = 1
    compute_environment = aws_batch_compute_environment.main[each.key].arn
  }
  job_state_time_limit_action {
    action           = "CANCEL"
    max_time_seconds = 3600
    reason           = "MISCONFIGURATION:JOB_RESOURCE_REQUIREMENT" # no machine of the queue is large enough
    state            = "RUNNABLE"
  }
}

resource "aws_batch_job_definition" "main" {
  for_each              = local.definitions
  name                  = "${var.name}-${each.key}"
  type                  = "container"
  platform_capabilities = ["EC2"]
  propagate_tags        = true
  container_properties = jsonencode({
    image                  = each.value.image
    command                = ["python", "cleanrl/ppo.py", "--help"]
    user                   = "1000:1000"
    privileged             = false
    readonlyRootFilesystem = false
    jobRoleArn             = aws_iam_role.job.arn
    executionRoleArn       = aws_iam_role.execution.arn
    resourceRequirements   = [for type, value in each.value.resources : { type = type, value = tostring(value) }]
    linuxParameters        = { sharedMemorySize = each.value.shared_memory, initProcessEnabled = false }
    ulimits                = [{ name = "nofile", softLimit = 65536, hardLimit = 65536 }]
    secrets                = [for name, arn in var.secrets : { name = name, valueFrom = arn }]
    logConfiguration = {
      logDriver = "awslogs"
      options = {
        "awslogs-group"         = aws_cloudwatch_log_group.jobs.name
        "awslogs-region"        = var.region
        "awslogs-stream-prefix" = each.key
      }
    }
    volumes = var.efs_file_system_id == "" ? [] : [{
      name = "shared"
      efsVolumeConfiguration = {
        fileSystemId        = var.efs_file_system_id
        transitEncryption   = "ENABLED"
        authorizationConfig = { iam = "ENABLED" }
      }
    }]
    mountPoints = var.efs_file_system_id == "" ? [] : [
      { sourceVolume = "shared", containerPath = "/mnt/cleanrl", readOnly = false }
    ]
  })
  # as cleanrl_utils asks for with every submission
  retry_strategy {
    attempts = var.job.attempts
    evaluate_on_exit {
      action       = "RETRY"
      on_exit_code = "75" # told to stop: there is a checkpoint
    }
    evaluate_on_exit {
      action       = "RETRY"
      on_exit_code = "137" # SIGKILL
    }
    evaluate_on_exit {
      action       = "RETRY"
      on_exit_code = "143" # SIGTERM
    }
    evaluate_on_exit {
      action           = "RETRY"
      on_status_reason = "Host EC2*" # the machine was taken away
    }
    evaluate_on_exit {
      action       = "EXIT"
      on_exit_code = "*" # what did not start has none, and is tried again
    }
  }
  timeout {
    attempt_duration_seconds = ceil(3600 * var.job.hours)
  }
}
