//! The DHCP servers of the guest's cards. They are tasks of the pod's process, so that leases are
//! renewed while the daemon is away, and need nothing but the sockets that came with the machine.

use std::sync::{Mutex, PoisonError};

use podvisor_dhcp::{Server, serve};
use podvisor_network::cni::DhcpServer;
use tokio::task::JoinSet;
use tracing::{info, warn};

/// The servers that run.
#[derive(Debug, Default)]
pub(super) struct DhcpServers {
    tasks: Mutex<JoinSet<()>>,
}

impl DhcpServers {
    /// Runs these servers in place of those that run. `leased` is called when the guest gets an
    /// address.
    ///
    /// # Errors
    /// One of them has a configuration that is not valid; then all stays as it was.
    pub(super) fn run(
        &self,
        servers: Vec<DhcpServer>,
        leased: impl Fn() + Clone + Send + Sync + 'static,
    ) -> Result<(), String> {
        let mut ready = Vec::new();
        for DhcpServer { socket, config } in servers {
            let client = config.client;
            let server = Server::new(config).map_err(|error| error.to_string())?;
            ready.push((client, socket, server));
        }
        let mut tasks = self.tasks.lock().unwrap_or_else(PoisonError::into_inner);
        // Those before end, and close their sockets.
        *tasks = JoinSet::new();
        for (client, socket, server) in ready {
            let leased = leased.clone();
            tasks.spawn(async move {
                let mut leases = 0;
                let answered = |server: &Server| {
                    let now = server.counters().leases;
                    if std::mem::replace(&mut leases, now) < now {
                        leased();
                    }
                };
                info!(%client, "the guest's DHCP requests are answered");
                let error = serve(socket, server, answered).await;
                warn!(%client, %error, "the guest's DHCP requests are not answered any more");
            });
        }
        Ok(())
    }
}
