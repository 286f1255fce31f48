# A VirtualMachine with a container disk is applied on one node, runs, answers behind a Service, is
# paused and resumed, restarted, and stopped; nothing may be left.

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
vm=/apis/kubevirt.io/v1/namespaces/default/virtualmachines/small
service=/api/v1/namespaces/default/services/small
until_true "the machine is applied" 300 send PATCH "$vm?fieldManager=try" vm.yaml apply-patch+yaml
until_true "its service is, too" 180 send PATCH "$service?fieldManager=try" service.yaml \
    apply-patch+yaml
until_true "the instance runs" 420 phase Running
console() { grep -qs "$1" $W/node-1/logs/default_virt-launcher-small*/compute/0.log; }
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
gone() { empty "${vmi%/small}" && empty $pods; }
until_true "the machine is stopped" 600 gone
kubectl get events --sort-by .lastTimestamp -o custom-columns=R:.reason,O:.involvedObject.kind
until_true "nothing is left" 300 nothing
