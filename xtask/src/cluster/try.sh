#!/bin/sh
# A cluster of one node, in the test host: all of Kubernetes' programs, podvisor as the kubelet's
# runtime, and podvisor-cluster. A VirtualMachine with a container disk is applied, runs, answers
# behind a Service, is paused and resumed, restarted, and stopped; nothing may be left. Variables
# come from `cargo xtask cluster --try`: BIN (Kubernetes' programs), PODVISOR, CLUSTER
# (podvisor-cluster), SMALL (a disk image), INSTALL.
set -eu

W=/run/try
IP=10.5.0.1
NODE=node-1
API=https://$IP:6443
SYSTEM=podvisor
mkdir -p $W/logs $W/net.d /var/lib/kubelet
cd $W

began=$(date +%s)
say() { echo "$(($(date +%s) - began)) s: $*"; }
fail() {
    say "FAILED: $*"
    for kind in vm vmi pod event; do
        echo "--- $kind"
        kubectl get $kind -o yaml 2>&1 | grep -v 'f:\|managedFields' | tail -n 150 | cut -c -300
    done
    for log in logs/*; do
        echo "--- $log"
        tail -n "${LINES_OF_LOGS:-15}" "$log" | cut -c -400
    done
    exit 1
}
# WHAT SECONDS COMMAND: until the command succeeds.
until_true() {
    what=$1
    end=$(($(date +%s) + $2))
    shift 2
    until "$@" > last 2>&1; do
        [ "$(date +%s)" -lt $end ] || { cat last; fail "not so: $what"; }
        sleep 3
    done
    say "$what"
}
start() { # NAME COMMAND
    name=$1
    shift
    "$@" > "logs/$name" 2>&1 < /dev/null &
    echo $! > "$name.pid"
}

# The node's address is no loopback address: Kubernetes refuses those in endpoints.
ip addr add $IP/32 dev lo

# Who is who. Tokens are enough for everybody but the front proxy. The controller manager's own
# controllers have no accounts of their own here, so it may do everything.
account() { echo "system:serviceaccount:$SYSTEM:podvisor-$1"; }
of_system="\"system:serviceaccounts,system:serviceaccounts:$SYSTEM\""
cat > tokens.csv << END
t-admin,admin,1,"system:masters"
t-scheduler,system:kube-scheduler,2
t-manager,system:kube-controller-manager,3,"system:masters"
t-kubelet,system:node:$NODE,4,"system:nodes"
t-controller,$(account controller),5,$of_system
t-admission,$(account admission),6,$of_system
t-api,$(account api),7,$of_system
END
for who in admin scheduler manager kubelet controller admission api; do
    cat > $who.conf << END
apiVersion: v1
kind: Config
clusters: [{name: c, cluster: {server: $API, insecure-skip-tls-verify: true}}]
users: [{name: u, user: {token: t-$who}}]
contexts: [{name: x, context: {cluster: c, user: u}}]
current-context: x
END
done
openssl ecparam -name prime256v1 -genkey -noout -out sa.key 2> /dev/null
openssl ecparam -name prime256v1 -genkey -noout -out proxy-ca.key 2> /dev/null
openssl req -x509 -new -key proxy-ca.key -subj /CN=front-proxy-ca -days 2 -out proxy-ca.crt
openssl ecparam -name prime256v1 -genkey -noout -out proxy.key 2> /dev/null
openssl req -new -key proxy.key -subj /CN=front-proxy-client -out proxy.csr
echo extendedKeyUsage=clientAuth > usage
openssl x509 -req -in proxy.csr -CA proxy-ca.crt -CAkey proxy-ca.key -CAcreateserial -days 2 \
    -extfile usage -out proxy.crt 2> /dev/null
say "made certificates"

start etcd "$BIN/etcd" --data-dir etcd --unsafe-no-fsync --log-level error \
    --listen-client-urls http://127.0.0.1:2379 --advertise-client-urls http://127.0.0.1:2379 \
    --listen-peer-urls http://127.0.0.1:2380
start kube-apiserver "$BIN/kube-apiserver" --etcd-servers http://127.0.0.1:2379 \
    --cert-dir certs --bind-address $IP --secure-port 6443 --token-auth-file tokens.csv \
    --service-account-key-file sa.key --service-account-signing-key-file sa.key \
    --service-account-issuer https://kubernetes.default.svc \
    --service-cluster-ip-range 10.6.0.0/24 --authorization-mode Node,RBAC \
    --enable-admission-plugins NodeRestriction --endpoint-reconciler-type none \
    --default-not-ready-toleration-seconds 3600 --default-unreachable-toleration-seconds 3600 \
    --requestheader-client-ca-file proxy-ca.crt --requestheader-allowed-names front-proxy-client \
    --requestheader-username-headers X-Remote-User --requestheader-group-headers X-Remote-Group \
    --requestheader-extra-headers-prefix X-Remote-Extra- --proxy-client-cert-file proxy.crt \
    --proxy-client-key-file proxy.key --enable-aggregator-routing=true \
    --enable-priority-and-fairness=false --profiling=false --request-timeout 5m
# What is asked again and again is asked by curl, which is 10 times cheaper to start, and needs no
# list of all resources. With this agent, answers have a line for each field.
get() { curl -ksf -m 60 -A curl -H "Authorization: Bearer t-admin" "$API$1"; }
# What a field says, if it is the only one of its name; FIELD or a condition TYPE.
field() { get "$1" | sed -n "s/^ *\"$2\": \"\?\([^\",]*\)\"\?,\?$/\1/p" | head -n 1; }
# The keys of a condition are in an order of their own for each kind: both neighbours are looked at.
is() { # PATH TYPE STATUS
    get "$1" | grep -B 1 -A 1 "\"type\": \"$2\"" | grep -q "\"status\": \"$3\""
}
kubectl() { "$BIN/kubectl" --kubeconfig $W/admin.conf "$@"; }
# A slow machine takes longer for the API's description than kubectl waits.
apply() { kubectl apply --server-side --validate=false -f "$1"; }
until_true "the API server is ready" 600 get /readyz
start scheduler "$BIN/kube-scheduler" --kubeconfig scheduler.conf --leader-elect=false
# The collector of garbage would watch every kind of object.
controllers=serviceaccount-controller,node-lifecycle-controller,endpointslice-controller
start manager "$BIN/kube-controller-manager" --kubeconfig manager.conf --leader-elect=false \
    --service-account-private-key-file sa.key --use-service-account-credentials=false \
    --node-monitor-grace-period 600s \
    --controllers $controllers

# The node: podvisor and the kubelet.
cat > net.d/10-pods.conflist << END
{"cniVersion": "1.0.0", "name": "pods", "plugins": [{"type": "bridge", "bridge": "cni0",
"isGateway": true, "ipam": {"type": "host-local", "ranges": [[{"subnet": "10.7.0.0/24"}]],
"routes": [{"dst": "0.0.0.0/0"}]}}]}
END
mkdir -p tree/disk
cp "$SMALL" tree/disk/
"$PODVISOR" --root $W/root import -q tree small
start podvisor "$PODVISOR" --root $W/root serve --log-level info --listen unix://$W/cri.sock \
    --state $W/state --cni-conf-dir $W/net.d --node-api $W/node.sock
until_true "podvisor serves" 60 test -S cri.sock
# KubeVirt's API. Its programs run beside the others, with the accounts of their Deployments.
until_true "the manifests are applied" 300 apply "$INSTALL"
slice() { # SERVICE PORT
    cat << END
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata:
  name: $1-here
  namespace: $SYSTEM
  labels: {kubernetes.io/service-name: $1}
addressType: IPv4
endpoints: [{addresses: ["$IP"], conditions: {ready: true}}]
ports: [{name: https, port: $2}]
END
}
{ slice podvisor-admission 8443; echo ---; slice podvisor-api 8444; } > slices.yaml
until_true "the services have endpoints" 120 apply slices.yaml
cat > kubelet.yaml << END
apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
authentication: {anonymous: {enabled: true}, webhook: {enabled: false}}
authorization: {mode: AlwaysAllow}
cgroupDriver: cgroupfs
cgroupsPerQOS: false
containerRuntimeEndpoint: unix://$W/cri.sock
enforceNodeAllocatable: []
evictionHard: {memory.available: 1Mi, nodefs.available: 1%, imagefs.available: 1%}
failSwapOn: false
localStorageCapacityIsolation: false
nodeLeaseDurationSeconds: 400
nodeStatusReportFrequency: 5m
nodeStatusUpdateFrequency: 30s
resolvConf: ""
runtimeRequestTimeout: 15m
serverTLSBootstrap: false
END
start kubelet "$BIN/kubelet" --kubeconfig kubelet.conf --config kubelet.yaml --node-ip $IP \
    --hostname-override $NODE --cert-dir kubelet-certs --root-dir $W/kubelet

RUST_LOG=info
export RUST_LOG
as() { # WHO ARGUMENTS
    who=$1
    shift
    start "podvisor-$who" env KUBECONFIG=$W/$who.conf "$CLUSTER" "$@"
}
as admission admission --listen $IP:8443
as api api --listen $IP:8444
as controller controller --lease-seconds 120
as kubelet node --kubeconfig $W/kubelet.conf --socket $W/node.sock
until_true "the node is ready" 900 is /api/v1/nodes/$NODE Ready True
services=/apis/apiregistration.k8s.io/v1/apiservices
until_true "the subresources are served" 600 is $services/v1.subresources.kubevirt.io Available True

cat > vm.yaml << END
apiVersion: kubevirt.io/v1
kind: VirtualMachine
metadata: {name: small, namespace: default}
spec:
  runStrategy: Always
  template:
    metadata: {labels: {app: small}}
    spec:
      terminationGracePeriodSeconds: 300
      readinessProbe: {httpGet: {port: 80, path: /hostname}, timeoutSeconds: 10, periodSeconds: 5}
      domain:
        memory: {guest: 224Mi}
        devices:
          disks: [{name: root, disk: {bus: virtio}}]
          interfaces: [{name: default, bridge: {}}]
      networks: [{name: default, pod: {}}]
      volumes: [{name: root, containerDisk: {image: small, imagePullPolicy: Never}}]
END
cat > service.yaml << END
apiVersion: v1
kind: Service
metadata: {name: small, namespace: default}
spec:
  selector: {app: small}
  ports: [{port: 80}]
END
# As `kubectl apply --server-side` does, without a list of all resources first.
send() { # VERB PATH FILE TYPE
    curl -ksf -m 60 -X "$1" -H "Authorization: Bearer t-admin" -H "Content-Type: application/$4" \
        --data-binary "@$3" "$API$2"
}
vm=/apis/kubevirt.io/v1/namespaces/default/virtualmachines/small
vmi=/apis/kubevirt.io/v1/namespaces/default/virtualmachineinstances/small
service=/api/v1/namespaces/default/services/small
until_true "the machine is applied" 300 send PATCH "$vm?fieldManager=try" vm.yaml apply-patch+yaml
until_true "its service is, too" 180 send PATCH "$service?fieldManager=try" service.yaml \
    apply-patch+yaml
# Phases that it was in have fields of that name as well, which end with commas.
phase() { get $vmi | grep -q "^    \"phase\": \"$1\""; }
until_true "the instance runs" 420 phase Running
console() { grep -qs "$1" /var/log/pods/default_virt-launcher-small*/compute/0.log; }
until_true "the guest has booted" 600 console "small: ready"

# Its readiness is the guest's: the pod's probe asks it for a page, and its Service has the answer.
slices=/apis/discovery.k8s.io/v1/namespaces/default/endpointslices
slices="$slices?labelSelector=kubernetes.io/service-name=small"
serves() { [ "$(field "$slices" ready)" = "$1" ]; }
until_true "the instance is ready" 300 is $vmi Ready True
until_true "the service has the guest" 120 serves true
address() { get "$slices" | sed -n 's/^ *"\(10\.7\.[0-9.]*\)".*/\1/p' | head -n 1; }
page() { [ "$(curl -sf -m 30 "http://$(address)/hostname")" = small ]; }
until_true "the guest answers behind the service" 120 page

# What people with kubectl see.
listed() { kubectl api-resources --api-group kubevirt.io | grep -q '^virtualmachineinstances '; }
until_true "kubectl lists the resources" 300 listed
explained() { kubectl explain virtualmachine.spec.runStrategy | grep -q "FIELD: runStrategy"; }
until_true "kubectl explains a field" 300 explained
until_true "kubectl gets machines" 300 kubectl get vm,vmi,pod -o wide
cat last

resource=virtualmachineinstances
subresources=/apis/subresources.kubevirt.io/v1/namespaces/default
echo '{}' > empty.json
put() { send PUT "$subresources/$resource/small/$1" empty.json json; }
is_running() { get $vmi > answer && ! grep -q '"type": "Paused"' answer; }
printable() { [ "$(field $vm printableStatus)" = "$1" ]; }
until_true "the machine is paused" 180 put pause
until_true "the pause is reported" 180 is $vmi Paused True
until_true "the machine says that it is paused" 180 printable Paused
until_true "a paused instance is not ready" 120 is $vmi Ready False
until_true "the service leaves it out" 120 serves false
until_true "the machine is resumed" 180 put unpause
until_true "the resumption is reported" 180 is_running
until_true "the service has it again" 120 serves true

# Its owner's is the first; the metadata's own has less before it.
uid() { get $vmi | sed -n 's/^    "uid": "\(.*\)".*/\1/p'; }
first=$(uid)
resource=virtualmachines
until_true "the machine is restarted" 180 put restart
is_another() { [ -n "$(uid)" ] && [ "$(uid)" != "$first" ]; }
until_true "another instance is made" 600 is_another
until_true "it runs" 420 phase Running
until_true "it is ready" 600 is $vmi Ready True

echo '{"spec":{"runStrategy":"Halted"}}' > halted.json
until_true "the machine is told to stop" 180 send PATCH $vm halted.json merge-patch+json
empty() { get "$1" > answer && grep -q '"items": \[\]' answer; }
gone() { empty "${vmi%/small}" && empty /api/v1/namespaces/default/pods; }
until_true "the machine is stopped" 600 gone
kubectl get events --sort-by .lastTimestamp -o custom-columns=R:.reason,O:.involvedObject.kind
# The kubelet removes sandboxes some time after their pods.
nothing() { [ -z "$(find $W/state/sb $W/root/volumes -mindepth 1 -maxdepth 1 2> /dev/null)" ]; }
until_true "nothing is left" 300 nothing
