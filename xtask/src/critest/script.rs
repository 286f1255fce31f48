//! What runs in the host: the registry, `podvisor serve` and the suite.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use serde_json::json;

use crate::host::quote;

/// Files in the directory of a run.
pub(super) const REPORT: &str = "report.json";
pub(super) const LOG: &str = "critest.log";
pub(super) const DAEMON_LOG: &str = "podvisor.log";

/// Directory of the socket and of all state within the host.
const STATE: &str = "/run/podvisor-critest";

/// The registries that the suite's images are named by.
const REGISTRIES: [&str; 3] = ["registry.k8s.io", "k8s.gcr.io", "gcr.io"];

/// Where the host's registry listens.
const ADDRESS: &str = "127.0.0.1:5000";

/// Which specs are run.
#[derive(Debug, Clone, Copy)]
pub(super) struct Selection<'a> {
    pub(super) focus: &'a [String],
    pub(super) skip: &'a [String],
}

impl Selection<'_> {
    fn arguments(&self) -> String {
        let focus = self.focus.iter().map(|name| ("focus", name));
        let skip = self.skip.iter().map(|name| ("skip", name));
        focus
            .chain(skip)
            .map(|(option, name)| format!(" {}", quote(&format!("--ginkgo.{option}={name}"))))
            .collect()
    }
}

/// Writes the script and what it reads to `run`; returns its path.
pub(super) fn write(
    run: &Path,
    podvisor: &Path,
    suite: &Path,
    images: &Path,
    selection: &Selection<'_>,
) -> Result<PathBuf> {
    let data = json!(images.join("data").display().to_string());
    let files = [
        (
            "registry.yml",
            format!(
                "version: 0.1\nlog: {{level: warn}}\n\
                 storage: {{filesystem: {{rootdirectory: {data}}}}}\n\
                 http: {{addr: \"{ADDRESS}\"}}\n"
            ),
        ),
        ("10-critest.conflist", network()),
    ];
    for (name, text) in files {
        fs::write(run.join(name), text)?;
    }
    for registry in REGISTRIES {
        let directory = run.join("hosts").join(registry);
        fs::create_dir_all(&directory)?;
        let text = format!("[host.\"http://{ADDRESS}\"]\ncapabilities = [\"pull\", \"resolve\"]\n");
        fs::write(directory.join("hosts.toml"), text)?;
    }
    let at = |name: &str| quote(&run.join(name).display().to_string());
    let program = |path: &Path| quote(&path.display().to_string());
    let text = format!(
        "mkdir -p {STATE}/net.d
cp {conflist} {STATE}/net.d/
docker-registry serve {registry} > {STATE}/registry.log 2>&1 &
registry=$!
PODVISOR_BOOT_TIMEOUT=900 {podvisor} --root {STATE}/root serve --listen unix://{STATE}/cri.sock --state {STATE}/state \\
    --cni-conf-dir {STATE}/net.d --hosts-dir {hosts} --log-level info 2> {daemon_log} &
daemon=$!
until [ -S {STATE}/cri.sock ]; do
    kill -0 $daemon 2> /dev/null || exit 1
    sleep 0.1
done
{suite} --runtime-endpoint unix://{STATE}/cri.sock --image-endpoint unix://{STATE}/cri.sock \\
    --ginkgo.seed=1 --ginkgo.no-color --ginkgo.timeout=24h \\
    --ginkgo.json-report={report}{selection} > {log} 2>&1
status=$?
kill $daemon $registry
wait $daemon
exit $status
",
        conflist = at("10-critest.conflist"),
        registry = at("registry.yml"),
        podvisor = program(podvisor),
        hosts = at("hosts"),
        daemon_log = at(DAEMON_LOG),
        suite = program(suite),
        report = at(REPORT),
        selection = selection.arguments(),
        log = at(LOG),
    );
    let script = run.join("run.sh");
    fs::write(&script, text).with_context(|| format!("failed to write {}", script.display()))?;
    Ok(script)
}

/// Returns a bridge network with ports of the host, of the plugins that Debian packages.
fn network() -> String {
    let list = json!({
        "cniVersion": "1.0.0",
        "name": "critest",
        "plugins": [
            {
                "type": "bridge",
                "bridge": "critest0",
                "isGateway": true,
                "ipMasq": true,
                "hairpinMode": true,
                "ipam": {
                    "type": "host-local",
                    "ranges": [[{ "subnet": "10.215.0.0/16" }]],
                    "routes": [{ "dst": "0.0.0.0/0" }],
                },
            },
            { "type": "portmap", "capabilities": { "portMappings": true } },
        ],
    });
    list.to_string()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::process::TempDir;

    #[test]
    fn the_script_is_one_that_a_shell_reads_whatever_is_selected() {
        let directory = TempDir::new("critest").unwrap();
        let run = directory.path();
        let [focus, skip] = ["it's (a|b)", "$HOME"].map(|text| [text.to_owned()]);
        let selection = Selection {
            focus: &focus,
            skip: &skip,
        };
        let [podvisor, suite] = ["/bin/pod visor", "/bin/suite"].map(Path::new);
        let script = write(run, podvisor, suite, Path::new("/images"), &selection).unwrap();
        let text = fs::read_to_string(&script).unwrap();
        assert!(text.contains(r"'--ginkgo.focus=it'\''s (a|b)'"), "{text}");
        assert!(text.contains("'--ginkgo.skip=$HOME'"), "{text}");
        let mut check = std::process::Command::new("sh");
        assert!(check.arg("-n").arg(&script).status().unwrap().success());
        for registry in REGISTRIES {
            assert!(
                run.join("hosts")
                    .join(registry)
                    .join("hosts.toml")
                    .is_file()
            );
        }
    }
}
