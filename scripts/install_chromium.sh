#!/bin/sh
# Installs Debian's chromium, which the tests of the live page look at it with. Needs root and apt-get.
set -eu
export DEBIAN_FRONTEND=noninteractive
apt-get update -q
apt-get install -q -y --no-install-recommends chromium fonts-dejavu-core
