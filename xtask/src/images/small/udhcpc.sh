#!/bin/busybox sh
# What udhcpc does with an answer.
case $1 in
bound | renew)
    ip addr flush dev "$interface"
    ip addr add "$ip/${mask:-24}" dev "$interface"
    [ -z "$mtu" ] || ip link set "$interface" mtu "$mtu"
    # Option 121 replaces the router: pairs of destination and gateway.
    set -- $staticroutes
    if [ $# -gt 0 ]; then
        while [ $# -gt 1 ]; do
            case $2 in
            0.0.0.0) ip route add "$1" dev "$interface" ;;
            *) ip route add "$1" via "$2" dev "$interface" onlink ;;
            esac
            shift 2
        done
    elif [ -n "$router" ]; then
        ip route add default via "${router%% *}" dev "$interface" onlink
    fi
    : >/etc/resolv.conf
    [ -z "$domain" ] || echo "search $domain" >>/etc/resolv.conf
    for server in $dns; do echo "nameserver $server" >>/etc/resolv.conf; done
    echo "small: $interface $ip/${mask:-24}, gateway ${router:-none}, dns ${dns:-none}"
    ;;
esac
