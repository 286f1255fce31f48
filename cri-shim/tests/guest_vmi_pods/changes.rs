//! What changes of a machine while its guest runs.

use podvisor_node_api::messages::VmName;
use tokio::time::timeout;

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

    /// Its card loses its link while it runs, is without one after a reset, and gets it again.
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
}
