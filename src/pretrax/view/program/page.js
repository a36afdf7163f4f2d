// The page around the picture: opening groups, moving, search, and the figures of what is selected.

import { byId, element, inflated } from './dom.js';

const program = Picture.prepare(JSON.parse(new TextDecoder().decode(await inflated(byId('program').textContent))))
const {data} = program, {nodes} = data
const svg = byId('picture'), panel = byId('panel'), search = byId('search')
const results = byId('results')
const open = new Set([data.root, ...nodes[data.root].c.filter((id) => ['forward', 'backward'].includes(nodes[id].n))])
let view = {x: 0, y: 0, scale: 1}, selected = -1, drawn = null

const show = () => {
  const {clientWidth, clientHeight} = svg
  svg.setAttribute('viewBox', `${view.x} ${view.y} ${clientWidth / view.scale} ${clientHeight / view.scale}`)
}
const place = (box, id, x = 0, y = 0) => {
  const here = {x: x + box.x, y: y + box.y, width: box.width, height: box.height}
  if (box.id === id) return here
  for (const child of box.children || []) {
    const found = place(child, id, here.x + 12, here.y + 36)
    if (found) return found
  }
  return null
}

function draw(fixed = -1) {
  const before = fixed >= 0 && drawn ? place(drawn.box, fixed) : null
  drawn = Picture.draw(program, open)
  svg.innerHTML = drawn.inside
  const after = before && place(drawn.box, fixed)
  if (after) { view.x += after.x - before.x; view.y += after.y - before.y }
  if (selected >= 0) svg.querySelector(`[data-id="${selected}"]`)?.classList.add('selected')
  show()
}
function fit() {
  view.scale = Math.min(1.4, svg.clientWidth / (drawn.width + 40), svg.clientHeight / (drawn.height + 40))
  view.x = (drawn.width - svg.clientWidth / view.scale) / 2
  view.y = (drawn.height - svg.clientHeight / view.scale) / 2
  show()
}
function toggle(id) {
  if (!Picture.canOpen(nodes[id]) || id === data.root) return
  if (open.has(id)) open.delete(id)
  else open.add(id)
  draw(id)
}
function goTo(id) {
  for (const above of Picture.ancestors(program, id).slice(0, -1)) open.add(above)
  selected = id
  draw()
  const {x, y, width, height} = place(drawn.box, id)
  view.scale = Math.max(view.scale, 0.7)
  view.x = x + width / 2 - svg.clientWidth / view.scale / 2
  view.y = y + height / 2 - svg.clientHeight / view.scale / 2
  show()
  describe(id)
}

// --- the panel -------------------------------------------------------------------------------------------------
const link = (id) => element('button', {className: 'link', onclick: () => goTo(id)}, nodes[id].n)
function row(table, name, value, key) {
  if (value === '' || value === null || value === undefined) return
  const line = element('tr'), head = element('th')
  head.append(key ? element('a', {href: `#definition-${key}`}, name) : name)
  line.append(head, element('td', {}, value))
  table.append(line)
}
function describe(id) {
  const node = nodes[id], table = element('table')
  panel.replaceChildren(element('h2', {}, node.n))
  row(table, 'in', Picture.ancestors(program, id).slice(1, -1).map((above) => nodes[above].n).join(' › '))
  if (id !== data.root) row(table, 'phase', data.phases[node.p])
  if (node.g) {
    row(table, 'kernels', node.k ? node.k.toLocaleString('en') : '', 'kernels')
    row(table, 'FLOPs', node.f ? Picture.flops(node.f) : '', 'flops')
    row(table, node.k ? 'traffic' : 'size', Picture.bytes(node.b), node.k ? 'traffic' : 'size')
    for (const [kind, size] of node.m) row(table, kind, Picture.bytes(size), 'communication')
  } else {
    row(table, 'operation', node.o)
    row(table, 'result', node.s)
    row(table, 'size', Picture.bytes(node.z), 'size')
    if (!node.inside) row(table, 'runs', node.t, 'runs')
    row(table, 'FLOPs of a run', node.f ? Picture.flops(node.f) : '', 'flops')
    if (node.r) row(table, 'read, written in a run', node.r.map(Picture.bytes).join(', '), 'traffic')
    if (node.m) row(table, node.m[0], `${Picture.bytes(node.m[1])}${node.m[3] ? ', overlapped' : ''}`, 'communication')
    row(table, 'source', node.u)
  }
  panel.append(table)
  if (Picture.canOpen(node) && id !== data.root) {
    const button = element('button', {}, open.has(id) ? 'Close' : node.g ? 'Open' : 'Open the contents of the fusion')
    button.onclick = () => { toggle(id); describe(id) }
    panel.append(button)
  }
  for (const [title, found] of [['Reads', program.reads.get(id)], ['Read by', program.readBy.get(id)]]) {
    if (!found) continue
    panel.append(element('h3', {}, title))
    const list = element('ul')
    for (const other of found.slice(0, 40)) {
      const item = element('li')
      item.append(link(other.id), ` ${other.type} ${Picture.bytes(other.size)}`)
      list.append(item)
    }
    if (found.length > 40) list.append(element('li', {}, `and ${found.length - 40} more`))
    panel.append(list)
  }
}

// --- mouse, keys, search ---------------------------------------------------------------------------------------
let drag = null
svg.addEventListener('pointerdown', (event) => { drag = {x: event.clientX, y: event.clientY, moved: false} })
window.addEventListener('pointermove', (event) => {
  if (!drag) return
  const dx = event.clientX - drag.x, dy = event.clientY - drag.y
  if (!drag.moved && Math.hypot(dx, dy) < 4) return
  view.x -= dx / view.scale
  view.y -= dy / view.scale
  drag = {x: event.clientX, y: event.clientY, moved: true}
  show()
})
window.addEventListener('pointerup', () => setTimeout(() => (drag = null)))
svg.addEventListener('wheel', (event) => {
  event.preventDefault()
  const box = svg.getBoundingClientRect(), factor = Math.exp(-event.deltaY * 0.0015)
  const scale = Math.min(4, Math.max(0.02, view.scale * factor))
  view.x += (event.clientX - box.left) * (1 / view.scale - 1 / scale)
  view.y += (event.clientY - box.top) * (1 / view.scale - 1 / scale)
  view.scale = scale
  show()
}, {passive: false})
const choose = (target) => {
  const found = target.closest('[data-id]')
  if (!found) return
  const id = Number(found.dataset.id)
  svg.querySelector('.selected')?.classList.remove('selected')
  selected = id
  found.classList.add('selected')
  if (nodes[id].g || open.has(id)) toggle(id)
  describe(id)
}
svg.addEventListener('click', (event) => { if (!drag?.moved) choose(event.target) })
svg.addEventListener('dblclick', (event) => {
  const found = event.target.closest('[data-id]')
  if (found && nodes[found.dataset.id].x && !open.has(Number(found.dataset.id))) toggle(Number(found.dataset.id))
})
svg.addEventListener('keydown', (event) => {
  if (event.key !== 'Enter' && event.key !== ' ') return
  event.preventDefault()
  const id = Number(event.target.dataset.id)
  toggle(id)
  describe(id)
  svg.querySelector(`[data-id="${id}"]`)?.focus()
})
search.addEventListener('input', () => {
  const words = search.value.toLowerCase().split(/\s+/).filter(Boolean)
  results.replaceChildren()
  if (!words.length) return
  const found = []
  nodes.forEach((node, id) => {
    const text = `${node.n} ${node.o ?? ''} ${node.s ?? ''} ${node.u ?? ''} ${node.m && !node.g ? node.m[0] : ''}`.toLowerCase()
    if (id !== data.root && words.every((word) => text.includes(word))) found.push(id)
  })
  results.append(element('li', {}, `${found.length.toLocaleString('en')} found`))
  for (const id of found.slice(0, 50)) {
    const item = element('li')
    item.append(link(id), ` ${Picture.ancestors(program, id).slice(1, -1).map((above) => nodes[above].n).join(' › ')}`)
    results.append(item)
  }
})
byId('fit').onclick = fit
byId('close').onclick = () => { open.clear(); open.add(data.root); draw(); fit() }
byId('deeper').onclick = () => {
  for (const id of [...open]) for (const child of nodes[id].c) if (nodes[child].g && open.size < 400) open.add(child)
  draw()
  fit()
}
byId('save').onclick = () => {
  const text = Picture.file(program, open, byId('picture-style').textContent)
  const made = element('a', {download: 'program.svg', href: URL.createObjectURL(new Blob([text], {type: 'image/svg+xml'}))})
  made.click()
  URL.revokeObjectURL(made.href)
}
window.addEventListener('resize', show)
draw()
fit()
describe(data.root)
document.body.dataset.ready = 'true'
