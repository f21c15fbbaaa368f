variable "region" {
  description = "Region of AWS, such as us-east-1."
  type        = string
  validation {
    condition     = can(regex("^[a-z]{2}(-[a-z]+)+-[0-9]$", var.region))
    error_message = "A region looks like us-east-1."
  }
}

variable "bucket" {
  description = "Name of the S3 bucket for lists of experiments, checkpoints and runs. Names of buckets are unique in the world."
  type        = string
  validation {
    condition     = can(regex("^[a-z0-9][a-z0-9-]{1,61}[a-z0-9]$", var.bucket))
    error_message = "3 to 63 lower-case letters, digits and hyphens."
  }
}

variable "image_tag" {
  description = "The images that jobs run are <repository>:<image_tag>-cpu and <repository>:<image_tag>-cuda. Tags cannot be overwritten: the commit makes a good one."
  type        = string
  validation {
    condition     = can(regex("^[A-Za-z0-9][A-Za-z0-9_.-]{0,99}$", var.image_tag)) && var.image_tag != "latest"
    error_message = "Letters, digits, dots, hyphens and underscores; not `latest`, as tags cannot be overwritten."
  }
}

variable "name" {
  description = "What the names of all parts begin with."
  type        = string
  default     = "cleanrl"
  validation {
    condition     = can(regex("^[a-z][a-z0-9-]{1,30}$", var.name))
    error_message = "2 to 31 lower-case letters, digits and hyphens, a letter first."
  }
}

variable "prefix" {
  description = "Folder of the bucket that jobs may read and write, and no other: --prefix of submit_exp."
  type        = string
  default     = "cleanrl"
  validation {
    condition     = can(regex("^[A-Za-z0-9][A-Za-z0-9_-]*$", var.prefix))
    error_message = "Letters, digits, hyphens and underscores."
  }
}

variable "max_vcpus" {
  description = "Most vCPUs that run at a time in each of the two queues for CPUs, which limits what they can cost in an hour. AWS Batch may exceed it by one machine."
  type        = number
  default     = 64
  validation {
    condition     = var.max_vcpus >= 0 && var.max_vcpus == floor(var.max_vcpus)
    error_message = "A whole number, 0 or more."
  }
}

variable "max_gpu_vcpus" {
  description = "The same for each of the two queues for GPUs; 0 makes none of the parts for GPUs."
  type        = number
  default     = 0
  validation {
    condition     = var.max_gpu_vcpus >= 0 && var.max_gpu_vcpus == floor(var.max_gpu_vcpus)
    error_message = "A whole number, 0 or more."
  }
}

variable "instance_types" {
  description = "Machines of the queues for CPUs, x86-64: types, or families, of which AWS Batch may also take the largest."
  type        = list(string)
  default = [
    "c6i.large", "c6i.xlarge", "c6i.2xlarge", "c6i.4xlarge",
    "c7i.large", "c7i.xlarge", "c7i.2xlarge", "c7i.4xlarge",
    "m6i.large", "m6i.xlarge", "m6i.2xlarge", "m6i.4xlarge",
    "m7i.large", "m7i.xlarge", "m7i.2xlarge", "m7i.4xlarge",
  ]
  validation {
    condition     = length(var.instance_types) > 0 && !contains(var.instance_types, "optimal")
    error_message = "Name types or families; with `optimal` the architecture would be a surprise."
  }
}

variable "gpu_instance_types" {
  description = "Machines of the queues for GPUs, with NVIDIA GPUs that CUDA 13 supports (Turing or newer)."
  type        = list(string)
  default     = ["g4dn.xlarge", "g5.xlarge", "g6.xlarge"]
  validation {
    condition     = length(var.gpu_instance_types) > 0
    error_message = "Name at least one."
  }
}

variable "disk_gb" {
  description = "Disk of a machine, in GB, whatever its size: its system, the image, and the runs of all jobs that are on it. More for larger machines than the default ones."
  type        = number
  default     = 60
  validation {
    condition     = var.disk_gb >= 40
    error_message = "At least 40."
  }
}

variable "job" {
  description = "What a job of the two definitions gets unless its submission says otherwise; memory and shared memory in MiB, time in hours."
  type = object({
    vcpus             = optional(number, 1)
    memory            = optional(number, 3500)
    gpu_vcpus         = optional(number, 4)
    gpu_memory        = optional(number, 14000)
    shared_memory     = optional(number, 1024)
    gpu_shared_memory = optional(number, 4096)
    attempts          = optional(number, 10)
    hours             = optional(number, 24)
  })
  default = {}
  validation {
    condition     = var.job.attempts >= 1 && var.job.attempts <= 10 && var.job.hours > 0
    error_message = "AWS Batch allows 1 to 10 attempts, and hours must be above 0."
  }
}

variable "secrets" {
  description = "Environment variable of jobs => ARN of the secret in AWS Secrets Manager that holds its value, such as WANDB_API_KEY or HF_TOKEN. Values stay there: they are in no file, plan or state of Terraform."
  type        = map(string)
  default     = {}
  validation {
    condition     = alltrue([for arn in values(var.secrets) : can(regex("^arn:[^:]+:secretsmanager:[^:]+:[0-9]{12}:secret:[^:]+$", arn))])
    error_message = "Each value must be the ARN of a secret in AWS Secrets Manager, not the secret."
  }
}

variable "vpc_id" {
  description = "An existing VPC to use; empty makes one."
  type        = string
  default     = ""
  validation {
    condition     = var.vpc_id == "" || can(regex("^vpc-[0-9a-f]+$", var.vpc_id))
    error_message = "It looks like vpc-0123456789abcdef0."
  }
}

variable "subnet_ids" {
  description = "Subnets of the existing VPC, with a way to the internet (or endpoints for ECR, ECS, S3, CloudWatch Logs and Secrets Manager)."
  type        = list(string)
  default     = []
  validation {
    condition     = (length(var.subnet_ids) > 0) == (var.vpc_id != "")
    error_message = "vpc_id and subnet_ids go together."
  }
}

variable "efs_file_system_id" {
  description = "An existing EFS file system that jobs mount at /mnt/cleanrl, for `--engine aws-batch`; empty for none. submit_exp needs none."
  type        = string
  default     = ""
  validation {
    condition     = var.efs_file_system_id == "" || can(regex("^fs-[0-9a-f]+$", var.efs_file_system_id))
    error_message = "It looks like fs-0123456789abcdef0."
  }
}

variable "log_days" {
  description = "Days for which the logs of jobs are kept; one of the numbers that CloudWatch has."
  type        = number
  default     = 30
  validation {
    condition     = contains([1, 3, 5, 7, 14, 30, 60, 90, 120, 150, 180, 365], var.log_days)
    error_message = "One of 1, 3, 5, 7, 14, 30, 60, 90, 120, 150, 180, 365."
  }
}

variable "budget" {
  description = "Monthly limit in US dollars of what carries the tag Project = name, for a message to `email` at 80 % and at 100 % as forecast; null for none. A message stops nothing."
  type = object({
    limit = number
    email = string
  })
  default = null
  validation {
    condition     = var.budget == null ? true : var.budget.limit > 0 && can(regex("@", var.budget.email))
    error_message = "A limit above 0, and an address."
  }
}
