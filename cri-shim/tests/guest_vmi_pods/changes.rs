//! What changes of a machine, and is taken of it, while its guest runs.

use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::process::Command;
use std::time::Duration;

use podvisor_node_api::messages::{DumpMemoryRequest, DumpState, VmName};
use serde_json::json;
use tokio::time::{sleep, timeout};
use tonic::Code;

use super::Guest;
use super::support::PATIENCE;

/// Waits until the guest uses two CPUs and more than 300 MB, and says so.
pub(super) const GROWN: &str = "until [ $(nproc) = 2 ] && grep -q 'MemTotal: *3[0-9]\\{5\\} ' /proc/meminfo; \
     do sleep 0.2; done; echo $((20 + 2)) CPUs, large";

/// Waits until the card has or has no link, and says so.
fn wait_for_link(carrier: u8, says: &str) -> String {
    format!("until grep -qx {carrier} /sys/class/net/eth0/carrier; do sleep 0.2; done; echo {says}")
}

impl Guest {
    /// It gets a CPU and memory while it runs: by ACPI and its agent, and by virtio-mem.
    pub(super) async fn grows(&self) {
        let (mut node, vm) = (self.node(), || VmName::new("tenant", "web", "7c0e"));
        let refused = node.resize_vm(vm(), 3, 0).await.unwrap_err();
        assert!(refused.message().contains("2 at most"), "{refused}");
        let refused = node.resize_vm(vm(), 0, 353 << 20).await.unwrap_err();
        assert!(refused.message().contains("at most"), "{refused}");
        node.resize_vm(vm(), 2, 0).await.unwrap();
        let look = "modprobe virtio_mem; echo $((30 + 3)) loaded";
        self.answers(look, &["33 loaded"]).await;
        let most = 352 << 20;
        let plug = async { while node.resize_vm(vm(), 0, most).await.unwrap() < most {} };
        timeout(PATIENCE, plug).await.unwrap();
        self.answers(GROWN, &["22 CPUs, large"]).await;
    }

    /// Its card loses its link while it runs, and gets it again.
    pub(super) async fn loses_its_link(&self) {
        let (mut node, vm) = (self.node(), || VmName::new("tenant", "web", "7c0e"));
        let refused = node.set_links(vm(), vec!["other".to_owned()]).await;
        let refused = refused.unwrap_err();
        assert!(refused.message().contains("no card \"other\""), "{refused}");
        node.set_links(vm(), vec!["default".to_owned()])
            .await
            .unwrap();
        let down = wait_for_link(0, "link $((40 + 4)) down");
        self.answers(&down, &["link 44 down"]).await;
        node.set_links(vm(), Vec::new()).await.unwrap();
        let up = wait_for_link(1, "link $((50 + 5)) up");
        self.answers(&up, &["link 55 up"]).await;
    }

    /// Its memory is dumped to the claim of another pod.
    pub(super) async fn is_dumped(&self) {
        let directory = self.daemon.path("claims/dumps");
        fs::create_dir_all(&directory).unwrap();
        let kept = json!({
            "instance": "7c0e", "volume": "dumps", "serial": "dumps", "memoryDump": true,
        });
        let keeper = self.keeps(&directory, "dumps", &kept).await;
        let mark = "printf 'marker-%s-here' $((123456 * 3)) >/tmp/marker; echo $((60 + 6)) marked";
        self.answers(mark, &["66 marked"]).await;
        let mut node = self.node();
        let name = "web-dumps-20261130-120000.memory.dump";
        let request = |file: &str| DumpMemoryRequest {
            vm: Some(VmName::new("tenant", "web", "7c0e")),
            pod_uid: "uid-keeper".to_owned(),
            file: file.to_owned(),
            limit_seconds: 0,
        };
        let refused = node.dump_memory(request("../web")).await.unwrap_err();
        assert_eq!(refused.code(), Code::InvalidArgument, "{refused}");
        let refused = node
            .plug_disk(VmName::new("tenant", "web", "7c0e"), "uid-keeper")
            .await
            .unwrap_err();
        assert!(refused.message().contains("memory dumps"), "{refused}");
        let dumped = async {
            loop {
                let answer = node.dump_memory(request(name)).await.unwrap();
                match answer.state() {
                    DumpState::Writing => sleep(Duration::from_millis(200)).await,
                    state => break (state, answer.message),
                }
            }
        };
        let dumped = timeout(PATIENCE, dumped).await.unwrap();
        assert_eq!(dumped, (DumpState::Done, String::new()));
        let names = fs::read_dir(&directory).unwrap();
        let names: Vec<_> = names.map(|entry| entry.unwrap().file_name()).collect();
        assert_eq!(names, [name]);
        let path = directory.join(name);
        let mut grep = Command::new("grep");
        let found = grep.args(["-q", "-a", "-F", "marker-370368-here"]);
        assert!(found.arg(&path).status().unwrap().success());
        let meta = fs::metadata(&path).unwrap();
        assert!(meta.blocks() * 512 < meta.len(), "zeroes are holes");
        assert_eq!(meta.mode() & 0o777, 0o600);
        let mut readelf = Command::new("readelf");
        let said = readelf
            .args(["-W", "-l", "-n"])
            .arg(&path)
            .output()
            .unwrap();
        let said = String::from_utf8(said.stdout).unwrap();
        // The registers of both of its CPUs.
        assert_eq!(said.matches("NT_PRSTATUS").count(), 2, "{said}");
        assert!(said.matches("  LOAD ").count() >= 1, "{said}");
        self.answers("echo $((70 + 9)) goes on", &["79 goes on"])
            .await;
        fs::remove_file(&path).unwrap();
        self.keeps_no_more(keeper).await;
    }
}
