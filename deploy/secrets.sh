#!/bin/sh
# Makes the secrets of the Compose deployment in deploy/secrets, each only if it is missing.
# The folder is its owner's alone; the files in it are readable, because the containers' users are not its owner.
set -eu

folder=${1:-$(dirname "$0")/secrets}

random() {
    od -An -N24 -tx1 /dev/urandom | tr -d ' \n'
}

write() {
    [ -e "$folder/$1" ] || printf '%s\n' "$2" > "$folder/$1"
}

mkdir -p "$folder"
chmod 700 "$folder"
umask 022

write redis_password "$(random)"
write trivet_token "$(random)"
write grafana_password "$(random)"

password=$(cat "$folder/redis_password")
# `health` may ping and nothing else, so that the health check needs no password.
printf 'user default on >%s ~* &* +@all\nuser health on nopass resetkeys resetchannels -@all +ping\n' "$password" \
    > "$folder/redis_users"
printf 'redis://:%s@redis:6379/0\n' "$password" > "$folder/redis_url"
