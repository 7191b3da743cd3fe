terraform {
  # 1.9 lets a validation look at other variables.
  required_version = ">= 1.9"

  required_providers {
    aws = {
      source = "hashicorp/aws"
      # 6.8.0 is the first release that accepts max_message_size above 262144.
      version = ">= 6.8.0, < 7.0.0"
    }
  }
}
