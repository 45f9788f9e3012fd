// Operator actions, each with a confirmation.

import { button } from "./dom.js";
import { ask } from "./dialog.js";
import { bytes, count } from "./format.js";
import { get, path, post, remove } from "./client.js";

export async function drain(node, draining) {
  const choice = await ask(draining
    ? {
      title: `Drain ${node}?`, verb: "Drain",
      text: "It gives back what it runs, after the round, and takes no new work until you undrain it.",
      fields: [{ name: "reason", label: "Reason (others see it)", value: "" }],
    }
    : { title: `Undrain ${node}?`, verb: "Undrain", text: "It takes work again." });
  if (!choice) return;
  const body = { draining, reason: choice.reason ?? "" };
  await post(path("nodes", node, "drain"), body, { done: draining ? `${node} drains.` : `${node} takes work again.` });
}

export async function evict(node) {
  const choice = await ask({
    title: `Evict ${node}?`, verb: "Evict", danger: true,
    text: "Its token and certificate end and its connection is cut. What it runs is placed elsewhere. "
      + "It comes back only with a new ticket.",
  });
  if (choice) await post(path("nodes", node, "revoke"), {}, { done: `${node} is evicted.` });
}

export async function stop(job) {
  const choice = await ask({
    title: `Stop ${job}?`, verb: "Stop", danger: true,
    text: "It ends after its round and saves a checkpoint. It can be resumed.",
  });
  if (choice) await post(path("jobs", job, "stop"), {}, { done: `${job} stops.` });
}

export async function resume(job) {
  const choice = await ask({
    title: `Resume ${job}?`, verb: "Resume", text: "It goes on from its newest checkpoint.",
  });
  if (choice) await post(path("jobs", job, "resume"), {}, { done: `${job} goes on.` });
}

// Deletes ended jobs; resolves to those that were deleted.
export async function erase(jobs) {
  const sizes = await Promise.all(jobs.map((job) => get(path("jobs", job, "size"))));
  const sum = (...names) => sizes.flatMap((size) => names.map((name) => size?.[name] ?? 0)).reduce((a, b) => a + b, 0);
  const checkpoints = sum("checkpoint_bytes");
  const choice = await ask({
    title: jobs.length === 1 ? `Delete ${jobs[0]}?` : `Delete ${jobs.length} jobs?`, verb: "Delete", danger: true,
    text: `${jobs.length > 1 ? `${jobs.join(", ")}. ` : ""}Record, curves, output, artifacts, checkpoints and queues are deleted permanently: `
      + `${count(sum("files"))} files, ${bytes(sum("file_bytes", "code_bytes", "queue_bytes"))}`
      + `${checkpoints ? `, ${bytes(checkpoints)} of them checkpoints` : ""}.`,
  });
  const gone = [];
  for (const job of choice ? jobs : []) {
    if (await remove(path("jobs", job), { done: `${job} is deleted.` })) gone.push(job);
  }
  return gone;
}

export async function resize({ job, min_nodes: min, nodes_wanted: max }) {
  const choice = await ask({
    title: `How many nodes for ${job}?`, verb: "Change",
    text: "With fewer than the minimum it waits; it never takes more than the maximum.",
    fields: [
      { name: "min", label: "At least", type: "number", min: 0, value: min },
      { name: "max", label: "At most", type: "number", min: 1, value: max },
    ],
  });
  if (!choice) return;
  const body = { min: Number(choice.min), max: Number(choice.max) };
  await post(path("jobs", job, "nodes"), body, { done: `${job}: ${body.min} to ${body.max} nodes.` });
}

export async function letter(verb, queue, seq) {
  const choice = await ask(verb === "requeue"
    ? { title: "Requeue the item?", verb: "Requeue", text: `Item ${seq} of ${queue} can be claimed again.` }
    : {
      title: "Discard the item?", verb: "Discard", danger: true,
      text: `Item ${seq} of ${queue} is deleted permanently.`,
    });
  if (!choice) return false;
  return post(path("queues", verb), { queue, seq }, { done: verb === "requeue" ? "Requeued." : "Discarded." });
}

export async function silence({ id, cause, kind }) {
  const choice = await ask({
    title: "Silence this alarm?", verb: "Silence",
    text: `${cause || kind}: no more messages about it; it stays in the list until its cause ends.`,
  });
  return choice ? post(path("alarms", String(id), "silence"), {}, { done: "Silenced." }) : false;
}

// Buttons for the state of a node or job; none for viewers.
export function nodeButtons(store, node) {
  if (!store.operator) return [];
  const gone = node.state !== "online";
  return [
    node.draining
      ? button("Undrain", () => drain(node.node, false), { disabled: gone && "" })
      : button("Drain", () => drain(node.node, true), { disabled: gone && "" }),
    button("Evict", () => evict(node.node), { class: "danger" }),
  ];
}

async function eraseShown(job) {
  if ((await erase([job])).length) location.hash = "#/jobs";
}

export function jobButtons(store, job) {
  if (!store.operator) return [];
  const alive = ["running", "waiting"].includes(job.state);
  return [
    alive ? button("Nodes…", () => resize(job)) : null,
    alive && !job.stopping ? button("Stop", () => stop(job.job), { class: "danger" }) : null,
    ["failed", "stopped"].includes(job.state) ? button("Resume", () => resume(job.job)) : null,
    alive ? null : button("Delete", () => eraseShown(job.job), { class: "danger" }),
  ].filter(Boolean);
}
