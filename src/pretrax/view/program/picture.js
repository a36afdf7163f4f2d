// Layout and drawing of a program's picture. It needs no browser: pretrax runs it to write SVG files, too.

globalThis.Picture = (() => {
  const WIDE = 7.2, NARROW = 6.2, LINE = 16, PAD = 12, HEADER = 24, GAP = 22
  const MOST = 60 // boxes that are laid out as a graph; more are put in rows
  const LABELS = 30 // edges of a group that have labels

  const escaped = (text) =>
    String(text).replace(/[&<>"']/g, (c) => ({'&': '&amp;', '<': '&lt;', '>': '&gt;', '"': '&quot;', "'": '&#39;'})[c])
  const clip = (text, most) => (text.length > most ? `${text.slice(0, most - 1)}…` : text)

  function scaled(n, unit) {
    for (const prefix of ['', 'k', 'M', 'G', 'T', 'P']) {
      if (n < 999.5) return `${Number(n.toPrecision(3))} ${prefix}${unit}`
      n /= 1000
    }
    return `${Number((n * 1000).toPrecision(3))} P${unit}`
  }
  const bytes = (n) => scaled(n, 'B')
  const flops = (n) => scaled(n, 'FLOP')

  /** The program with what layout needs: parents, and the edges of each group between the boxes in it. */
  function prepare(data) {
    const parent = new Array(data.nodes.length).fill(-1)
    data.nodes.forEach((node, id) => { for (const child of node.c || []) parent[child] = id })
    const program = {data, parent, edges: new Map(), laidOut: new Map(), reads: new Map(), readBy: new Map()}
    for (const [source, target, type, size] of data.edges) addEdge(program, source, target, data.types[type], size)
    return program
  }

  const ancestors = (program, id) => {
    const chain = []
    for (let at = id; at >= 0; at = program.parent[at]) chain.push(at)
    return chain.reverse()
  }

  function addEdge(program, source, target, type, size) {
    const from = ancestors(program, source), to = ancestors(program, target)
    let depth = 0
    while (depth < from.length && depth < to.length && from[depth] === to[depth]) depth++
    if (depth === 0 || depth >= from.length || depth >= to.length) return
    const group = from[depth - 1]
    if (!program.edges.has(group)) program.edges.set(group, new Map())
    const merged = program.edges.get(group), key = `${from[depth]} ${to[depth]}`
    if (!merged.has(key)) merged.set(key, {from: from[depth], to: to[depth], arrays: new Map()})
    merged.get(key).arrays.set(`${source} ${type}`, {source, type, size})
    const remember = (map, id, other) => (map.get(id) || map.set(id, []).get(id)).push({id: other, type, size})
    remember(program.reads, target, source)
    remember(program.readBy, source, target)
  }

  /** Adds the contents of a fusion as boxes, when it is opened for the first time. */
  function unfold(program, id) {
    const node = program.data.nodes[id]
    if (node.c || !node.x) return
    const ids = node.x.map((inner) => {
      program.data.nodes.push({...inner, p: inner.p ?? node.p, t: node.t, inside: true})
      program.parent.push(id)
      return program.data.nodes.length - 1
    })
    node.c = ids
    node.x.forEach((inner, i) => { for (const a of inner.a) addEdge(program, ids[a], ids[i], node.x[a].s, node.x[a].z) })
  }

  const canOpen = (node) => Boolean(node.c || node.x)

  function edgeLabel(edge) {
    const arrays = [...edge.arrays.values()]
    const total = arrays.reduce((sum, one) => sum + one.size, 0)
    if (arrays.length === 1) return `${clip(arrays[0].type, 26)} ${bytes(total)}`
    const dtypes = [...new Set(arrays.map((one) => one.type.replace(/[[(].*/, '') || 'tuple'))]
    return `${arrays.length} × ${clip(dtypes.join(' '), 14)} ${bytes(total)}`
  }

  const count = (n, what) => `${n.toLocaleString('en')} ${what}${n === 1 ? '' : 's'}`
  const totals = (node) => `${count(node.k, 'kernel')} · ${node.f ? `${flops(node.f)} · ` : ''}${bytes(node.b)}`

  /** The lines of text in a box: [text, class]. */
  function lines(node) {
    if (node.g) {
      const found = [[(node.c.length ? '▸ ' : '') + node.n, 'name']]
      if (node.k) found.push([totals(node), 'figure'])
      else found.push([`${count(node.a, 'array')} · ${bytes(node.b)}`, 'figure'])
      for (const [kind, size, axes] of node.m.slice(0, 4)) found.push([`${kind} ${bytes(size)}`, `comm axis-${axes}`])
      return found
    }
    const found = [[(node.x ? '▸ ' : '') + clip(node.n, 34), 'name']]
    found.push([`${clip(node.s, 32)} ${bytes(node.z)}`, 'figure'])
    if (node.f) found.push([`${flops(node.f)}${node.t > 1 && !node.inside ? ` × ${node.t}` : ''}`, 'figure'])
    if (node.m) found.push([`${node.m[0]} ${bytes(node.m[1])}${node.t > 1 ? ` × ${node.t}` : ''}`, `comm axis-${node.m[2]}`])
    return found
  }

  const heading = (node) =>
    node.g
      ? `▾ ${node.n}${node.k ? ` — ${totals(node)}` : ''}`
      : `▾ ${clip(node.n, 40)} — ${clip(node.s, 40)}`

  /** The size of a group and the places of everything in it, for the boxes that are open. */
  function layout(program, id, open) {
    const node = program.data.nodes[id]
    if (!open.has(id) || !canOpen(node)) {
      const text = lines(node)
      const width = Math.max(90, ...text.map(([t, style]) => t.length * (style === 'figure' ? NARROW : WIDE) + 2 * PAD))
      return {id, width, height: text.length * LINE + PAD, text}
    }
    unfold(program, id)
    const children = node.c.map((child) => layout(program, child, open))
    const edges = [...(program.edges.get(id) || new Map()).values()]
    const inside = arrange(program, children, edges, id === program.data.root ? 'LR' : 'TB')
    return {
      id, children, edges: inside.edges, heading: heading(node),
      width: Math.max(inside.width + 2 * PAD, heading(node).length * WIDE + 2 * PAD), height: inside.height + HEADER + 2 * PAD,
    }
  }

  /** Places boxes: those that edges connect as graphs, all others in rows. Sets x and y of each box. */
  function arrange(program, boxes, edges, direction) {
    const byId = new Map(boxes.map((box) => [box.id, box]))
    const group = new Map(boxes.map((box) => [box.id, box.id]))
    const find = (id) => {
      while (group.get(id) !== id) id = group.get(id)
      return id
    }
    for (const edge of edges) group.set(find(edge.from), find(edge.to))
    const parts = new Map()
    for (const box of boxes) (parts.get(find(box.id)) || parts.set(find(box.id), []).get(find(box.id))).push(box)
    const labelled = edges.length <= LABELS
    const blocks = []
    for (const members of parts.values()) {
      const own = edges.filter((edge) => find(edge.from) === find(members[0].id))
      if (members.length === 1) blocks.push({boxes: members, edges: [], width: members[0].width, height: members[0].height, places: [[0, 0]]})
      else if (members.length > MOST) blocks.push(inRows(members, own, byId))
      else blocks.push(asGraph(program, members, own, direction, labelled))
    }
    return pack(blocks)
  }

  function asGraph(program, boxes, edges, direction, labelled) {
    const number = new Map(boxes.map((box, i) => [box.id, i]))
    const labels = edges.map(edgeLabel)
    const key = JSON.stringify([direction, labelled, boxes.map((b) => [b.width, b.height]), edges.map((e, i) => [number.get(e.from), number.get(e.to), labels[i].length])])
    if (!program.laidOut.has(key)) {
      const graph = new dagre.graphlib.Graph({multigraph: false})
      graph.setGraph({rankdir: direction, nodesep: 18, ranksep: labelled ? 22 : 30, edgesep: 8, marginx: 0, marginy: 0})
      boxes.forEach((box, i) => { graph.setNode(String(i), {width: box.width, height: box.height}) })
      edges.forEach((edge, i) => {
        const label = labelled ? {width: labels[i].length * 5.6, height: 12, labelpos: 'c'} : {}
        graph.setEdge(String(number.get(edge.from)), String(number.get(edge.to)), label)
      })
      dagre.layout(graph)
      program.laidOut.set(key, {
        width: graph.graph().width, height: graph.graph().height,
        places: boxes.map((box, i) => [graph.node(String(i)).x - box.width / 2, graph.node(String(i)).y - box.height / 2]),
        routes: edges.map((edge) => {
          const found = graph.edge(String(number.get(edge.from)), String(number.get(edge.to)))
          return {points: found.points.map((p) => [p.x, p.y]), label: labelled ? [found.x, found.y] : null}
        }),
      })
    }
    const known = program.laidOut.get(key)
    return {
      boxes, width: known.width, height: known.height, places: known.places,
      edges: edges.map((edge, i) => ({edge, text: labels[i], ...known.routes[i]})),
    }
  }

  /** Many boxes: in rows, in the order in which they run. */
  function inRows(boxes, edges, byId) {
    const area = boxes.reduce((sum, box) => sum + (box.width + GAP) * (box.height + GAP), 0)
    const most = Math.max(Math.sqrt(area * 1.8), ...boxes.map((box) => box.width))
    let x = 0, y = 0, row = 0, width = 0
    const places = boxes.map((box) => {
      if (x && x + box.width > most) { y += row + GAP; x = row = 0 }
      const place = [x, y]
      x += box.width + GAP
      row = Math.max(row, box.height)
      width = Math.max(width, x - GAP)
      return place
    })
    const at = new Map(boxes.map((box, i) => [box.id, [places[i][0] + box.width / 2, places[i][1] + byId.get(box.id).height / 2]]))
    return {
      boxes, places, width, height: y + row,
      edges: edges.map((edge) => ({edge, text: edgeLabel(edge), points: [at.get(edge.from), at.get(edge.to)], label: null, faint: true})),
    }
  }

  function pack(blocks) {
    const area = blocks.reduce((sum, block) => sum + (block.width + GAP) * (block.height + GAP), 0)
    const most = Math.max(Math.sqrt(area * 1.8), ...blocks.map((block) => block.width))
    let x = 0, y = 0, row = 0, width = 0
    const edges = []
    for (const block of blocks) {
      if (x && x + block.width > most) { y += row + GAP; x = row = 0 }
      block.boxes.forEach((box, i) => { box.x = x + block.places[i][0]; box.y = y + block.places[i][1] })
      for (const one of block.edges) {
        const shift = ([a, b]) => [a + x, b + y]
        edges.push({...one, points: one.points.map(shift), label: one.label && shift(one.label)})
      }
      x += block.width + GAP
      row = Math.max(row, block.height)
      width = Math.max(width, x - GAP)
    }
    return {width, height: y + row, edges}
  }

  const round = (n) => Math.round(n * 10) / 10

  function path(points) {
    const [first, ...rest] = points.map(([x, y]) => [round(x), round(y)])
    if (rest.length < 2) return `M${first}L${rest[0]}`
    let found = `M${first}`
    for (let i = 0; i < rest.length - 1; i++) {
      const middle = i === rest.length - 2 ? rest[i + 1] : [round((rest[i][0] + rest[i + 1][0]) / 2), round((rest[i][1] + rest[i + 1][1]) / 2)]
      found += `Q${rest[i]} ${middle}`
    }
    return found
  }

  function drawEdge(one) {
    const arrays = [...one.edge.arrays.values()].sort((a, b) => b.size - a.size)
    const total = arrays.reduce((sum, array) => sum + array.size, 0)
    const width = round(Math.min(5, Math.max(0.8, Math.log10(total + 1) / 2 - 1.5)))
    const title = arrays.slice(0, 12).map((array) => `${array.type} ${bytes(array.size)}`).join('\n') + (arrays.length > 12 ? `\n… ${arrays.length} arrays` : '')
    const label = one.label
      ? `<text class="edge-label" x="${round(one.label[0])}" y="${round(one.label[1] + 4)}" text-anchor="middle">${escaped(one.text)}</text>` : ''
    return `<g class="edge${one.faint ? ' faint' : ''}"><title>${escaped(title)}</title><path d="${path(one.points)}" stroke-width="${width}" marker-end="url(#arrow)"/>${label}</g>`
  }

  function drawBox(program, box, depth) {
    const node = program.data.nodes[box.id], phase = program.data.phases[node.p]
    const opens = canOpen(node)
    const kind = node.g ? 'group' : node.m ? `operation collective axis-${node.m[2]}` : 'operation'
    const role = opens ? ` role="button" tabindex="0" aria-expanded="${Boolean(box.children)}"` : ''
    const start = `<g class="${kind} phase-${phase}${box.children ? ' open' : ''} depth-${depth % 2}" data-id="${box.id}"${role} transform="translate(${round(box.x)} ${round(box.y)})">`
    const frame = `<rect width="${round(box.width)}" height="${round(box.height)}" rx="${node.g ? 7 : 3}"/>`
    if (!box.children) {
      const text = box.text.map(([line, style], i) => `<text class="${style}" x="${PAD}" y="${LINE * (i + 1)}">${escaped(line)}</text>`).join('')
      return `${start}<title>${escaped(node.n)}</title>${frame}${text}</g>`
    }
    const inside = box.edges.map(drawEdge).join('') + box.children.map((child) => drawBox(program, child, depth + 1)).join('')
    return `${start}${frame}<text class="name" x="${PAD}" y="${LINE}">${escaped(box.heading)}</text><g transform="translate(${PAD} ${HEADER + PAD})">${inside}</g></g>`
  }

  /** The picture as the inside of an svg element, with its size. */
  function draw(program, open) {
    const box = layout(program, program.data.root, open)
    box.x = box.y = 0
    const arrow = '<defs><marker id="arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" markerUnits="userSpaceOnUse" orient="auto"><path d="M0 0L8 4L0 8z" class="arrow"/></marker></defs>'
    return {box, width: Math.ceil(box.width), height: Math.ceil(box.height), inside: arrow + drawBox(program, box, 0)}
  }

  /** A whole SVG file. */
  function file(program, open, style) {
    const {width, height, inside} = draw(program, open)
    return `<svg xmlns="http://www.w3.org/2000/svg" viewBox="-10 -10 ${width + 20} ${height + 20}" width="${width + 20}" height="${height + 20}" class="picture">` +
      `<title>${escaped(program.data.title)}</title><style>${style}</style><rect class="paper" x="-10" y="-10" width="${width + 20}" height="${height + 20}"/>${inside}</svg>\n`
  }

  /** Everything that can be opened, without the contents of fusions, but at most about `most` boxes: outer groups first. */
  function everything(program, most) {
    const open = new Set()
    let level = [program.data.root], count = 1
    while (level.length) {
      const next = []
      for (const id of level) {
        const children = program.data.nodes[id].c
        if (!program.data.nodes[id].g || count + children.length > most) continue
        open.add(id)
        count += children.length
        next.push(...children)
      }
      level = next
    }
    return open
  }

  return {prepare, draw, file, everything, unfold, canOpen, ancestors, bytes, flops}
})()
