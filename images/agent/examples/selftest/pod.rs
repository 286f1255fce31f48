//! Resources that the containers of a pod share, and the guest's settings for all of them.
//!
//! Needs a network card with the MAC address 52:54:00:12:34:56.

use std::collections::HashMap;

use anyhow::{Context as _, Result, ensure};
use podvisor_agent_protocol::api;
use podvisor_agent_protocol::{AgentError, ErrorKind};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

use super::{Host, no_timeout, spec, text};

pub(super) async fn check(host: &mut Host) -> Result<()> {
    network(host).await.context("network")?;
    processes(host).await.context("processes")?;
    limits(host).await.context("limits")?;
    forwarding(host).await.context("forwarding")?;
    groups(host).await.context("groups")?;
    mounts(host).await.context("mounts")
}

/// A container of a pod: network, IPC and host name are the guest's, processes the pod's.
fn of_pod(script: &str) -> Value {
    let mut spec = spec(&["sh", "-c", script]);
    spec["linux"]["namespaces"] = json!([{"type": "mount"}, {"type": "pid", "path": "sandbox"}]);
    spec.as_object_mut().expect("an object").remove("hostname");
    spec
}

async fn network(host: &mut Host) -> Result<()> {
    let configure = api::ConfigureRequest {
        interfaces: vec![api::Interface {
            mac: "52:54:00:12:34:56".into(),
            name: "net1".into(),
            addresses: vec!["10.9.0.2/24".into(), "fd09::2/64".into()],
            mtu: 1400,
            ..Default::default()
        }],
        routes: vec![api::Route {
            destination: "0.0.0.0/0".into(),
            gateway: "10.9.0.1".into(),
            interface: "net1".into(),
            ..Default::default()
        }],
        sysctls: HashMap::from([("net.core.somaxconn".into(), "77".into())]),
        ..Default::default()
    };
    for _ in 0..2 {
        host.agent.configure(no_timeout(), &configure).await?;
    }
    let script = "hostname; cat /sys/class/net/net1/mtu /proc/sys/net/core/somaxconn; \
                  grep -c ^net1 /proc/net/route; grep -c ^fd09 /proc/net/if_inet6";
    let out = host.run(Host::request("net", &of_pod(script)), b"").await?;
    ensure!(
        out.stdout == b"guest\n1400\n77\n2\n1\n",
        "{}{}",
        text(&out.stdout),
        text(&out.stderr)
    );
    Ok(())
}

async fn create(host: &Host, id: &str, spec: &Value) -> Result<api::StartContainerResponse> {
    let request = Host::request(id, spec);
    host.agent.create_container(no_timeout(), &request).await?;
    let start = api::StartContainerRequest {
        container_id: id.into(),
        ..Default::default()
    };
    Ok(host.agent.start_container(no_timeout(), &start).await?)
}

async fn delete(host: &Host, id: &str) -> Result<Vec<String>> {
    let request = api::DeleteContainerRequest {
        container_id: id.into(),
        ..Default::default()
    };
    let deleted = host.agent.delete_container(no_timeout(), &request).await?;
    Ok(deleted.released_images)
}

async fn processes(host: &mut Host) -> Result<()> {
    let started = create(host, "sleeper", &of_pod("exec sleep 1000")).await?;
    ensure!(started.started_at_ns > 1_700_000_000_000_000_000 && started.pid > 1);
    let script = "cat /proc/1/comm; cat /proc/[0-9]*/comm | grep -c sleep; kill -9 1; \
                  (sh -c 'sleep 0 & exit 0'); usleep 100000; cat /proc/[0-9]*/stat | grep -c ' Z '";
    let out = host
        .run(Host::request("looker", &of_pod(script)), b"")
        .await?;
    ensure!(
        out.stdout == b"pause\n1\n0\n",
        "{}{}",
        text(&out.stdout),
        text(&out.stderr)
    );
    let list = host
        .agent
        .list_containers(no_timeout(), &Default::default())
        .await?;
    let sleeper = list.containers.first().context("a container")?;
    ensure!(sleeper.started_at_ns == started.started_at_ns && sleeper.exit.is_none());

    let signal = api::SignalProcessRequest {
        container_id: "sleeper".into(),
        signal: 9,
        ..Default::default()
    };
    host.agent.signal_process(no_timeout(), &signal).await?;
    let wait = api::WaitProcessRequest {
        container_id: "sleeper".into(),
        ..Default::default()
    };
    let ended = host.agent.wait_process(no_timeout(), &wait).await?;
    let list = host
        .agent
        .list_containers(no_timeout(), &Default::default())
        .await?;
    let sleeper = list.containers.first().context("a container")?;
    ensure!(sleeper.exit.as_ref() == Some(&ended), "{sleeper:?}");

    // The image is released with its last user, and can immediately be mounted again.
    create(host, "second", &of_pod("exec sleep 1000")).await?;
    ensure!(delete(host, "sleeper").await?.is_empty());
    ensure!(delete(host, "second").await? == ["img0"]);
    ensure!(delete(host, "second").await?.is_empty());
    Ok(())
}

async fn limits(host: &mut Host) -> Result<()> {
    create(host, "limited", &of_pod("exec sleep 1000")).await?;
    let stats = api::ContainerStatsRequest {
        container_id: "limited".into(),
        ..Default::default()
    };
    let before = host.agent.container_stats(no_timeout(), &stats).await?;
    ensure!(before.memory.limit_bytes == 64 << 20 && before.pids.limit == 50);
    let update = |resources: Value| api::UpdateContainerResourcesRequest {
        container_id: "limited".into(),
        resources_json: serde_json::to_vec(&resources).expect("JSON"),
        ..Default::default()
    };
    let more = update(
        json!({"memory": {"limit": 134_217_728}, "cpu": {"quota": 50_000, "period": 100_000}}),
    );
    host.agent
        .update_container_resources(no_timeout(), &more)
        .await?;
    let after = host.agent.container_stats(no_timeout(), &stats).await?;
    ensure!(after.memory.limit_bytes == 128 << 20 && after.pids.limit == 50);
    let group = format!("/sys/fs/cgroup{}", cgroup_of(host, "limited").await?);
    let quota = std::fs::read_to_string(format!("{group}/cpu.max"))?;
    ensure!(quota == "50000 100000\n", "{quota}");
    let devices = update(json!({"devices": [{"allow": true}]}));
    let refused = host
        .agent
        .update_container_resources(no_timeout(), &devices)
        .await;
    let kind = AgentError::from(refused.err().context("devices were taken")?).kind;
    ensure!(kind == ErrorKind::InvalidArgument);
    delete(host, "limited").await?;
    Ok(())
}

async fn cgroup_of(host: &Host, id: &str) -> Result<String> {
    let list = host
        .agent
        .list_containers(no_timeout(), &Default::default())
        .await?;
    let container = list.containers.iter().find(|c| c.container_id == id);
    let pid = container.context("no such container")?.pid;
    let text = std::fs::read_to_string(format!("/proc/{pid}/cgroup"))?;
    let line = text.trim_end().strip_prefix("0::");
    Ok(line.context("no cgroup v2")?.to_owned())
}

async fn forwarding(host: &mut Host) -> Result<()> {
    create(host, "server", &of_pod("exec nc -ll -p 8080 -e cat")).await?;
    let mut attempts = 0;
    let stream = loop {
        let id = host.id();
        let request = api::PortForwardRequest {
            stream: id.as_bytes().to_vec(),
            port: 8080,
            ..Default::default()
        };
        match host.agent.port_forward(no_timeout(), &request).await {
            Ok(_) => break host.stream(id).await?,
            // The server needs a moment until it listens.
            Err(error) => {
                let error = AgentError::from(error);
                ensure!(error.kind == ErrorKind::ConnectionRefused, "{error:?}");
                attempts += 1;
                ensure!(attempts < 200, "nobody listens");
                tokio::time::sleep(std::time::Duration::from_millis(20)).await;
            }
        }
    };
    let mut stream = stream;
    stream.write_all(b"there and back").await?;
    stream.shutdown().await?;
    let mut back = String::new();
    stream.read_to_string(&mut back).await?;
    ensure!(back == "there and back", "{back:?}");
    delete(host, "server").await?;
    Ok(())
}

async fn groups(host: &mut Host) -> Result<()> {
    use api::SupplementalGroups as Wanted;
    for (wanted, user, groups) in [
        (
            Wanted::SUPPLEMENTAL_GROUPS_UNSPECIFIED,
            "alice",
            "1000 7 50\n",
        ),
        (Wanted::SUPPLEMENTAL_GROUPS_UNSPECIFIED, "alice:5", "5 7\n"),
        (Wanted::SUPPLEMENTAL_GROUPS_MERGE, "1000:5", "5 7 50\n"),
        (Wanted::SUPPLEMENTAL_GROUPS_STRICT, "alice", "1000 7\n"),
    ] {
        let mut spec = of_pod("id -G");
        spec["process"]["user"]["additionalGids"] = json!([7]);
        let mut request = Host::request("groups", &spec);
        request.user = user.into();
        request.supplemental_groups = wanted.into();
        let out = host.run(request, b"").await?;
        ensure!(text(&out.stdout) == groups, "{user}: {}", text(&out.stdout));
    }
    Ok(())
}

async fn mounts(host: &mut Host) -> Result<()> {
    // The agent does not check what is below a share: a directory works as well.
    std::fs::create_dir_all("/run/podvisor/shared/data")?;
    std::fs::write("/run/podvisor/shared/data/file", "from outside\n")?;
    std::fs::write("/run/podvisor/shared/one", "a file\n")?;
    let mut spec = of_pod(
        "cat /data/file /one; echo in > /data/new && echo wrote; echo x > /ro/new; \
         echo y > /dev/shm/between; df -k /scratch | tail -n 1 | tr -s ' ' | cut -d ' ' -f 2",
    );
    let mounts = spec["mounts"].as_array_mut().context("mounts")?;
    mounts.retain(|mount| mount["destination"] != "/dev/shm");
    let shared = "/run/podvisor/shared";
    mounts.extend([
        json!({"destination": "/data", "type": "bind", "source": format!("{shared}/data"), "options": ["rbind", "rw", "rslave"]}),
        json!({"destination": "/ro", "type": "bind", "source": format!("{shared}/data"), "options": ["rbind", "rro", "rprivate"]}),
        json!({"destination": "/one", "type": "bind", "source": format!("{shared}/one"), "options": ["bind", "ro"]}),
        json!({"destination": "/dev/shm", "type": "bind", "source": "/dev/shm", "options": ["bind", "rw"]}),
        json!({"destination": "/scratch", "type": "tmpfs", "source": "tmpfs", "options": ["nosuid", "size=1048576"]}),
    ]);
    let out = host.run(Host::request("mounts", &spec), b"").await?;
    ensure!(
        out.stdout == b"from outside\na file\nwrote\n1024\n",
        "{}{}",
        text(&out.stdout),
        text(&out.stderr)
    );
    ensure!(text(&out.stderr).contains("Read-only file system"));
    ensure!(std::fs::read("/run/podvisor/shared/data/new")? == b"in\n");
    ensure!(std::fs::read("/dev/shm/between")? == b"y\n");
    std::fs::remove_dir_all("/run/podvisor/shared")?;

    for source in [
        "/",
        "/run/podvisor/state",
        "/run/podvisor/shared/../state",
        "/proc",
    ] {
        let mut spec = of_pod("true");
        let mounts = spec["mounts"].as_array_mut().context("mounts")?;
        mounts.push(json!({"destination": "/x", "type": "bind", "source": source}));
        let refused = host.run(Host::request("outside", &spec), b"").await;
        let error = refused
            .err()
            .with_context(|| format!("{source} was taken"))?;
        ensure!(error.kind == ErrorKind::InvalidArgument, "{error:?}");
    }
    Ok(())
}
