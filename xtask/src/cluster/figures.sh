# Plain pods and VirtualMachineInstances take turns on one node. Printed are the seconds from the
# creation of each object until its container's program, or its guest's first instruction, runs, and
# the memory that an instance's process takes beyond its guest's.

GUEST_MIB=224
ROUNDS="1 2 3"
mkdir -p plain-tree/bin
cp /bin/busybox plain-tree/bin/
"$PODVISOR" --root $W/node-1/root import -q plain-tree plain
cat > pod.yaml << END
apiVersion: v1
kind: Pod
metadata: {name: plain, namespace: default}
spec:
  terminationGracePeriodSeconds: 0
  automountServiceAccountToken: false
  containers: [{name: main, image: plain, imagePullPolicy: Never,
    command: [/bin/busybox, sleep, "86400"]}]
END
cat > vmi.yaml << END
apiVersion: kubevirt.io/v1
kind: VirtualMachineInstance
metadata: {name: small, namespace: default}
spec:
  terminationGracePeriodSeconds: 0
  domain:
    memory: {guest: ${GUEST_MIB}Mi}
    devices: {disks: [{name: root, disk: {bus: virtio}}]}
  volumes: [{name: root, containerDisk: {image: small, imagePullPolicy: Never}}]
END

# The first of the times in a field of that name, as seconds since 1970.
time_of() { # PATH FIELD
    time=$(get "$1" | sed -n "s/^ *\"$2\": \"\(.*\)T\(.*\)Z\",\?$/\1 \2/p" | head -n 1)
    date -u -d "$time" +%s
}
created() { time_of "$1" creationTimestamp; }
# The only pod that there is.
started() { time_of $pods startedAt; }
has_started() { get $pods | grep -q '"startedAt"'; }
delete() { curl -ksf -X DELETE -H "Authorization: Bearer t-admin" "$API$1" > answer; }
no_pods() { empty $pods; }

# What the only machine's process has in its share (PSS) apart from the mapping that is the guest's
# memory, in KiB: nothing if no process has such a mapping.
beyond() {
    for process in /proc/[0-9]*; do
        awk -v guest=$((GUEST_MIB * 1024)) '
            $1 == "Size:" { size = $2 }
            $1 == "Pss:" { if (size == guest) found = 1; else sum += $2 }
            END { if (found) print sum }' "$process/smaps" 2> /dev/null
    done | sort -n | tail -n 1
}

: > plain.seconds
: > instance.seconds
: > beyond.kib
for round in $ROUNDS; do
    until_true "round $round: the pod is applied" 180 send PATCH \
        "$pods/plain?fieldManager=try" pod.yaml apply-patch+yaml
    until_true "its program runs" 600 has_started
    echo $(($(started) - $(created $pods/plain))) >> plain.seconds
    delete $pods/plain
    until_true "it is gone" 300 no_pods
    until_true "nothing is left of it" 300 nothing

    until_true "round $round: the instance is applied" 180 send PATCH "$vmi?fieldManager=try" \
        vmi.yaml apply-patch+yaml
    until_true "its guest runs" 600 has_started
    echo $(($(started) - $(created $vmi))) >> instance.seconds
    until_true "the instance runs" 300 phase Running
    console() { grep -qs "small: ready" $W/node-1/logs/default_virt-launcher-small*/compute/0.log; }
    until_true "its guest has booted" 600 console
    beyond >> beyond.kib
    delete $vmi
    until_true "it is gone" 600 empty "${vmi%/small}"
    until_true "its pod is gone" 300 no_pods
    until_true "nothing is left of it" 300 nothing
done
middle() { sort -n "$1" | sed -n "$((($(wc -l < "$1") + 1) / 2))p"; }
[ "$(wc -w < beyond.kib)" = "$(wc -w < plain.seconds)" ] || fail "no mapping is the guest's memory"
plain=$(middle plain.seconds)
instance=$(middle instance.seconds)
echo
echo "from creation until it runs (s):"
echo "  plain pods          $(tr '\n' ' ' < plain.seconds) median $plain"
echo "  instances           $(tr '\n' ' ' < instance.seconds) median $instance"
awk -v a="$instance" -v b="$plain" 'BEGIN { printf "  ratio               %.2f (at most 1.5)\n", a / b }'
echo "memory beyond the guest's, of $GUEST_MIB MiB (KiB, PSS; at most 24576):"
echo "  instances           $(tr '\n' ' ' < beyond.kib) median $(middle beyond.kib)"
