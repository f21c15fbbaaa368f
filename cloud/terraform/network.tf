# A network with a way out and none in. Public subnets without any inbound rule: private ones need a NAT gateway or
# endpoints, which cost money by the hour also while nothing runs. Give vpc_id and subnet_ids to use others.

locals {
  make_network = var.vpc_id == ""
  vpc_id       = local.make_network ? aws_vpc.main[0].id : var.vpc_id
  subnet_ids   = local.make_network ? aws_subnet.public[*].id : var.subnet_ids
}

data "aws_availability_zones" "available" {
  #checkov:skip=CKV_AWS_394:The first three by name, whatever the region has; a zone more comes behind them.
  state = "available"
  filter {
    name   = "opt-in-status"
    values = ["opt-in-not-required"]
  }
}

data "aws_vpc" "used" {
  count = var.efs_file_system_id == "" ? 0 : 1
  id    = local.vpc_id
}

resource "aws_vpc" "main" {
  #checkov:skip=CKV2_AWS_11:Flow logs cost money while nothing runs, and nothing here can be reached from outside.
  count                = local.make_network ? 1 : 0
  cidr_block           = "10.42.0.0/16"
  enable_dns_support   = true
  enable_dns_hostnames = true
  tags                 = { Name = var.name }
}

# The group that AWS makes with every VPC: without a rule, nothing can use it by mistake.
resource "aws_default_security_group" "main" {
  count  = local.make_network ? 1 : 0
  vpc_id = aws_vpc.main[0].id
}

resource "aws_internet_gateway" "main" {
  count  = local.make_network ? 1 : 0
  vpc_id = aws_vpc.main[0].id
  tags   = { Name = var.name }
}

# Three zones: a Spot machine that one has not, another may have.
resource "aws_subnet" "public" {
  #checkov:skip=CKV_AWS_130:An address is the way out without a NAT gateway; no inbound rule exists.
  count                   = local.make_network ? min(3, length(data.aws_availability_zones.available.names)) : 0
  vpc_id                  = aws_vpc.main[0].id
  availability_zone       = data.aws_availability_zones.available.names[count.index]
  cidr_block              = cidrsubnet(aws_vpc.main[0].cidr_block, 4, count.index)
  map_public_ip_on_launch = true
  tags                    = { Name = "${var.name}-${count.index}" }
}

resource "aws_route_table" "public" {
  count  = local.make_network ? 1 : 0
  vpc_id = aws_vpc.main[0].id
  tags   = { Name = var.name }
}

resource "aws_route" "out" {
  count                  = local.make_network ? 1 : 0
  route_table_id         = aws_route_table.public[0].id
  destination_cidr_block = "0.0.0.0/0"
  gateway_id             = aws_internet_gateway.main[0].id
}

resource "aws_route_table_association" "public" {
  count          = length(aws_subnet.public)
  subnet_id      = aws_subnet.public[count.index].id
  route_table_id = aws_route_table.public[0].id
}

# Checkpoints go to S3 without leaving the network of AWS; this kind of endpoint is free.
resource "aws_vpc_endpoint" "s3" {
  count             = local.make_network ? 1 : 0
  vpc_id            = aws_vpc.main[0].id
  service_name      = "com.amazonaws.${var.region}.s3"
  vpc_endpoint_type = "Gateway"
  route_table_ids   = [aws_route_table.public[0].id]
}

resource "aws_security_group" "machines" {
  name        = "${var.name}-machines"
  description = "Machines of AWS Batch: nothing comes in, HTTPS goes out"
  vpc_id      = local.vpc_id
}

resource "aws_vpc_security_group_egress_rule" "https" {
  security_group_id = aws_security_group.machines.id
  description       = "ECR, ECS, CloudWatch, S3, W&B, the hub"
  ip_protocol       = "tcp"
  from_port         = 443
  to_port           = 443
  cidr_ipv4         = "0.0.0.0/0"
}

resource "aws_vpc_security_group_egress_rule" "efs" {
  count             = var.efs_file_system_id == "" ? 0 : 1
  security_group_id = aws_security_group.machines.id
  description       = "EFS in this VPC"
  ip_protocol       = "tcp"
  from_port         = 2049
  to_port           = 2049
  cidr_ipv4         = data.aws_vpc.used[0].cidr_block
}
