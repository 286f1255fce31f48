# A VirtualMachineInstance with a container disk runs on one of two nodes, moves to the other one
# and back, and answers without having booted again; nothing may be left.

cat > vmi.yaml << END
apiVersion: kubevirt.io/v1
kind: VirtualMachineInstance
metadata: {name: small, namespace: default}
spec:
  terminationGracePeriodSeconds: 30
  domain:
    memory: {guest: 224Mi}
    devices:
      disks: [{name: root, disk: {bus: virtio}}]
      interfaces: [{name: default, masquerade: {}}]
  networks: [{name: default, pod: {}}]
  volumes: [{name: root, containerDisk: {image: small, imagePullPolicy: Never}}]
END
until_true "the instance is applied" 300 send PATCH "$vmi?fieldManager=try" vmi.yaml \
    apply-patch+yaml
until_true "the instance runs" 420 phase Running
console() { cat $W/node-*/logs/default_virt-launcher-small*/compute/0.log 2> /dev/null; }
has_booted() { console | grep -q "small: ready"; }
until_true "the guest has booted" 600 has_booted
# What comes first of the address is its own; the list of all follows.
on() { field $vmi nodeName; }
address() { get $vmi | sed -n 's/^ *"ipAddress": "\(10\.7\.[0-9.]*\)".*/\1/p' | head -n 1; }
page() { [ "$(curl -sf -m 30 "http://$(address)/hostname")" = small ]; }
until_true "the guest answers" 180 page

# An emulated machine that has little of its host takes longer than a node may: set by whoever
# administers the cluster.
installation=/apis/kubevirt.io/v1/namespaces/$SYSTEM/kubevirts/kubevirt
cat > installation.yaml << END
apiVersion: kubevirt.io/v1
kind: KubeVirt
metadata: {name: kubevirt, namespace: $SYSTEM}
spec: {configuration: {migrations: {completionTimeoutPerGiB: 800}}}
END
until_true "migrations get more time" 60 send PATCH "$installation?fieldManager=try" \
    installation.yaml apply-patch+yaml

migrations=/apis/kubevirt.io/v1/namespaces/default/virtualmachineinstancemigrations
move() { # NAME
    name=$1
    from=$(on)
    cat > migration.yaml << END
apiVersion: kubevirt.io/v1
kind: VirtualMachineInstanceMigration
metadata: {name: $name, namespace: default}
spec: {vmiName: small}
END
    until_true "migration $name is applied" 180 send PATCH "$migrations/$name?fieldManager=try" \
        migration.yaml apply-patch+yaml
    ended() {
        get $migrations/$name > answer
        grep -q '^    "phase": "\(Failed\|Succeeded\)"' answer
    }
    until_true "migration $name has ended" 900 ended
    grep -q '^    "phase": "Succeeded"' answer || fail "$(cat answer)"
    sed -n 's/^ *"\(startTimestamp\|endTimestamp\)": /  \1 /p' answer | sort -u
    [ "$(on)" != "$from" ] || fail "it is on $from still"
    one_pod() { [ "$(get $pods | grep -c '"nodeName":')" = 1 ]; }
    until_true "one pod is left" 300 one_pod
    until_true "the guest answers at $(on)" 180 page
    phase Running || fail "it does not run"
    [ "$(console | grep -c "small: ready")" -le 1 ] || fail "it booted again"
}
move there
move back
kubectl get events --sort-by .lastTimestamp -o custom-columns=R:.reason,O:.involvedObject.kind
curl -ksf -X DELETE -H "Authorization: Bearer t-admin" "$API$vmi" > answer
gone() { empty "${vmi%/small}" && empty $pods; }
until_true "the instance is gone" 600 gone
until_true "nothing is left" 300 nothing
