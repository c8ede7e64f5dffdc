#!/usr/bin/env bash
# Installs Chromium and its driver from the packages of Debian; as root.
set -euo pipefail
export DEBIAN_FRONTEND=noninteractive
apt-get update
apt-get install --yes --no-install-recommends chromium chromium-driver
