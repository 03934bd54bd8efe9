#!/bin/sh
# A container of docker/compose.wan.yaml:
#   host GATEWAY                                  a machine of a site; send by this router what goes elsewhere
#   router SITE RATE DELAY_MS SUBNET=ROUTER... [masquerade]
#                                                 the router of the site whose addresses begin with SITE
# Compose gives network devices no names, so they are found by their addresses.
set -eu
device_of() { ip -o -4 address | awk -v begin="$1" 'index($4, begin) == 1 {print $2}'; }

role=$1
shift
if [ "$role" = host ]; then
  ip route replace default via "$1"
  exec sleep infinity
fi

site=$1 rate=$2 delay_ms=$3
shift 3
inside=$(device_of "$site") outside=$(device_of 11.77.0.)
for device in "$inside" "$outside"; do
  tc qdisc replace dev "$device" root tbf rate "$rate" burst 32kb latency 400ms
done
# What comes from the site goes through the delay line, and from there to where it wants.
delay_s=$(awk -v ms="$delay_ms" 'BEGIN {print ms / 1000}')
python3 /wan_line.py "$delay_s" 0 &
line=$!
until ip link show early > /dev/null 2>&1; do sleep 0.1; done
ip link set late up
ip link set early up
ip rule add iif "$inside" lookup 100
ip route add default dev late table 100
for each in "$@"; do
  case $each in
  masquerade)
    nft -f - <<RULES
table ip home {
  chain first { type filter hook prerouting priority raw; iifname "$inside" notrack; }
  chain out { type nat hook postrouting priority srcnat; oifname "$outside" masquerade; }
  chain through {
    type filter hook forward priority filter; policy drop;
    iifname { "$inside", "early" } accept
    ct state established,related accept
  }
  chain door { type filter hook input priority filter; iifname "$outside" ct state new drop; }
}
RULES
    ;;
  *)
    ip route add "${each%=*}" via "${each#*=}"
    ;;
  esac
done
echo "site $site* is joined: $rate, $delay_ms ms"
wait "$line"
