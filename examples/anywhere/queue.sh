#!/bin/sh
# A hub's queues from a shell: log in once, put, claim, acknowledge.
#   atoll ticket new --role program            prints atoll://HOST:PORT/SECRET~MARK
#   sh queue.sh http://HOST:PORT SECRET
# A hub with TLS: https://..., and its authority in CURL_CA_BUNDLE (`DATA/tls/ca.pem`, or /ca.pem).
set -eu
hub=$1 secret=$2

ask() {  # ask VERB JSON: one request; the answer is JSON
    curl --silent --show-error --fail-with-body "$hub/api/$1" \
        -H "Authorization: Bearer ${token:-}" -H "Content-Type: application/json" -d "$2"
}
field() { sed -n "s/.*\"$1\":\"\([^\"]*\)\".*/\1/p"; }

token=$(ask login "{\"secret\": \"$secret\", \"name\": \"shell\"}" | field token)

# The same key again is stored once: repeat a request whose answer was lost.
ask queues/put '{"queue": "pool/work", "key": "k1", "value": {"seed": 7}}'
echo
ask queues/put '{"queue": "pool/work", "key": "k1", "value": {"seed": 7}}'
echo

# A lease of a minute; what is not acknowledged by then comes back. `wait_s` waits for an item.
item=$(ask queues/claim '{"queue": "pool/work", "lease_s": 60, "wait_s": 5}')
echo "$item"
ask queues/ack "{\"queue\": \"pool/work\", \"lease\": \"$(echo "$item" | field lease)\"}"
echo
