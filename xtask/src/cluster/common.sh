# A cluster in the test host: all of Kubernetes' programs, podvisor as each kubelet's runtime, and
# podvisor-cluster. Variables come from `cargo xtask cluster`: BIN (Kubernetes' programs), PODVISOR,
# CLUSTER (podvisor-cluster), SMALL (a disk image), INSTALL, NUMBERS (of the nodes). What is done
# with it follows: `try.sh`, or `migrate.sh`.
set -eu

W=/run/try
IP=10.5.0.1
API=https://$IP:6443
SYSTEM=podvisor
mkdir -p $W/logs /var/lib/kubelet
cd $W

began=$(date +%s)
say() { echo "$(($(date +%s) - began)) s: $*"; }
fail() {
    say "FAILED: $*"
    for kind in vm vmi vmim pod event; do
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

# Nodes' addresses are no loopback addresses: Kubernetes refuses those in endpoints.
for number in $NUMBERS; do
    ip addr add 10.5.0.$number/32 dev lo
done

# Who is who. Tokens are enough for everybody but the front proxy. The controller manager's own
# controllers have no accounts of their own here, so it may do everything.
account() { echo "system:serviceaccount:$SYSTEM:podvisor-$1"; }
of_system="\"system:serviceaccounts,system:serviceaccounts:$SYSTEM\""
cat > tokens.csv << END
t-admin,admin,1,"system:masters"
t-scheduler,system:kube-scheduler,2
t-manager,system:kube-controller-manager,3,"system:masters"
t-controller,$(account controller),5,$of_system
t-admission,$(account admission),6,$of_system
t-api,$(account api),7,$of_system
END
kubelets=
for number in $NUMBERS; do
    kubelets="$kubelets node-$number"
    echo "t-node-$number,system:node:node-$number,1$number,\"system:nodes\"" >> tokens.csv
done
for who in admin scheduler manager controller admission api $kubelets; do
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

# A node: podvisor and the kubelet, each with directories and an address of its own.
mkdir -p tree/disk
cp "$SMALL" tree/disk/
make_node() { # NUMBER
    number=$1
    node=node-$number
    own=$W/$node
    mkdir -p $own/net.d $own/logs
    cat > $own/net.d/10-pods.conflist << END
{"cniVersion": "1.0.0", "name": "pods", "plugins": [{"type": "bridge", "bridge": "cni$number",
"isGateway": true, "ipam": {"type": "host-local", "dataDir": "$own/ipam",
"ranges": [[{"subnet": "10.7.$number.0/24"}]], "routes": [{"dst": "0.0.0.0/0"}]}}]}
END
    "$PODVISOR" --root $own/root import -q tree small
    start serve-$node "$PODVISOR" --root $own/root serve --log-level info \
        --listen unix://$own/cri.sock --state $own/state --cni-conf-dir $own/net.d \
        --node-api $own/node.sock
    until_true "podvisor serves $node" 60 test -S $own/cri.sock
}
for number in $NUMBERS; do make_node $number; done
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
join() { # NUMBER
    number=$1
    node=node-$number
    own=$W/$node
    cat > $own/kubelet.yaml << END
apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
address: 10.5.0.$number
authentication: {anonymous: {enabled: true}, webhook: {enabled: false}}
authorization: {mode: AlwaysAllow}
cgroupDriver: cgroupfs
cgroupsPerQOS: false
containerRuntimeEndpoint: unix://$own/cri.sock
enforceNodeAllocatable: []
evictionHard: {memory.available: 1Mi, nodefs.available: 1%, imagefs.available: 1%}
failSwapOn: false
healthzBindAddress: 10.5.0.$number
localStorageCapacityIsolation: false
nodeLeaseDurationSeconds: 400
nodeStatusReportFrequency: 5m
nodeStatusUpdateFrequency: 30s
podLogsDir: $own/logs
resolvConf: ""
runtimeRequestTimeout: 15m
serverTLSBootstrap: false
END
    start kubelet-$node "$BIN/kubelet" --kubeconfig $node.conf --config $own/kubelet.yaml \
        --node-ip 10.5.0.$number --hostname-override $node --cert-dir $own/certs \
        --root-dir $own/kubelet
}
for number in $NUMBERS; do join $number; done

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
for number in $NUMBERS; do
    as node-$number node --kubeconfig $W/node-$number.conf --socket $W/node-$number/node.sock \
        --listen 10.5.0.$number:8186
done
for number in $NUMBERS; do
    until_true "node-$number is ready" 900 is /api/v1/nodes/node-$number Ready True
done
services=/apis/apiregistration.k8s.io/v1/apiservices
until_true "the subresources are served" 600 is $services/v1.subresources.kubevirt.io Available True


# As `kubectl apply --server-side` does, without a list of all resources first.
send() { # VERB PATH FILE TYPE
    curl -ksf -m 60 -X "$1" -H "Authorization: Bearer t-admin" -H "Content-Type: application/$4" \
        --data-binary "@$3" "$API$2"
}
empty() { get "$1" > answer && grep -q '"items": \[\]' answer; }
pods=/api/v1/namespaces/default/pods
vmi=/apis/kubevirt.io/v1/namespaces/default/virtualmachineinstances/small
# Phases that it was in have fields of that name as well, which end with commas.
phase() { get $vmi | grep -q "^    \"phase\": \"$1\""; }
# The kubelet removes sandboxes some time after their pods.
nothing() {
    for number in $NUMBERS; do
        own=$W/node-$number
        [ -z "$(find $own/state/sb $own/root/volumes -mindepth 1 -maxdepth 1 2> /dev/null)" ] \
            || return 1
    done
}
