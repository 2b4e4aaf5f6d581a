package app

import "slices"

// Use says what the controllers of a config do with a source or sink: what a program must be allowed to do there.
type Use struct {
	// Config is the component's own config, as its factory decoded it.
	Config any
	// Watched says that it is listed and watched; Read, that single objects are read; Written, that they are.
	Watched, Read, Written bool
	// Owners are the sources whose keys own what is written.
	Owners []string
}

// Uses returns the use of every source and sink that a controller references, by name.
func (p *Plan) Uses() map[string]Use {
	uses := make(map[string]Use)
	configs := make(map[string]any)
	for _, s := range p.sources {
		configs[s.name] = s.config
	}
	for _, s := range p.sinks {
		configs[s.name] = s.config
	}
	note := func(name string, f func(u *Use)) {
		u := uses[name]
		u.Config = configs[name]
		f(&u)
		uses[name] = u
	}
	for i := range p.Config.Controllers {
		c, h := &p.Config.Controllers[i], p.handlers[i]
		note(c.For, func(u *Use) { u.Watched, u.Read = true, true })
		for _, w := range c.Watches {
			note(w.Source, func(u *Use) { u.Watched = true })
		}
		for _, name := range c.Reads {
			note(name, func(u *Use) { u.Watched = true })
		}
		for _, name := range h.reads {
			note(name, func(u *Use) { u.Read = true })
		}
		for _, name := range slices.Concat(c.Owns, h.owns) {
			note(name, func(u *Use) {
				u.Watched, u.Read, u.Written = true, true, true
				if !slices.Contains(u.Owners, c.For) {
					u.Owners = append(u.Owners, c.For)
				}
			})
		}
	}
	return uses
}

// ConnectionConfig returns the decoded config of a connection, nil if there is none of this name.
func (p *Plan) ConnectionConfig(name string) any { return p.connections[name].config }
