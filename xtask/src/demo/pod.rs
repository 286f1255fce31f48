//! The demo's pod: `podvisor serve` in the host, and two containers of two images, created over its
//! socket as a kubelet does.

use std::fs;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result};
use serde_json::json;

use crate::host::{self, Request, quote};
use crate::paths;

/// Directory of the socket and of all state within the host.
const STATE: &str = "/run/podvisor-demo";

/// How long the pod may take in an emulated host.
const LIMIT: Duration = Duration::from_secs(300);

/// Runs a pod of the two images, which are in the store already; returns its exit status.
pub(super) fn run(
    directory: &Path,
    podvisor: &Path,
    example: &Path,
    store: &Path,
    images: [&str; 2],
) -> Result<u8> {
    let cni = directory.join("cni");
    fs::create_dir_all(&cni)?;
    fs::write(cni.join("10-demo.conflist"), network())?;
    let file = directory.join("pod.sh");
    let path = |path: &Path| quote(&path.display().to_string());
    let [server, client] = images.map(quote);
    let text = format!(
        "mkdir -p {STATE}
{podvisor} --root {store} serve --listen unix://{STATE}/cri.sock --state {STATE}/state \\
    --cni-conf-dir {cni} 2>{STATE}/log &
daemon=$!
until [ -S {STATE}/cri.sock ]; do
    kill -0 $daemon 2>/dev/null || {{ cat {STATE}/log >&2; exit 1; }}
    sleep 0.1
done
{example} {STATE}/cri.sock {server} {client}
rc=$?
[ $rc -eq 0 ] || cat {STATE}/log >&2
kill $daemon && wait $daemon
exit $rc
",
        podvisor = path(podvisor),
        store = path(store),
        cni = path(&cni),
        example = path(example),
    );
    fs::write(&file, text).with_context(|| format!("{} cannot be written", file.display()))?;
    host::run_request(Request {
        command: vec!["sh".to_owned(), file.display().to_string()],
        environment: vec![(
            "PODVISOR_GUEST_DIR".to_owned(),
            paths::guest().display().to_string(),
        )],
        limit: Some(LIMIT),
        ..Request::default()
    })
}

/// Returns a bridge network with its own addresses, for the plugins that Debian packages.
fn network() -> String {
    let list = json!({
        "cniVersion": "1.0.0",
        "name": "demo",
        "plugins": [{
            "type": "bridge",
            "bridge": "demo0",
            "isGateway": true,
            "ipam": {
                "type": "host-local",
                "ranges": [[{ "subnet": "10.214.0.0/24" }]],
                "routes": [{ "dst": "0.0.0.0/0" }],
            },
        }],
    });
    list.to_string()
}
