package expr

import (
	"cel.dev/cel-go/cel"
	"cel.dev/cel-go/common/types"
	"cel.dev/cel-go/common/types/ref"
	"cel.dev/cel-go/common/types/traits"
)

// arithmetic declares the operators that NewCompiler leaves out of the standard library, with what JSON needs: int and
// double mix, and the result is a double. All else is as CEL defines it.
func arithmetic() []cel.EnvOption {
	add := func(l, r ref.Val) ref.Val { return l.(traits.Adder).Add(r) }
	subtract := func(l, r ref.Val) ref.Val { return l.(traits.Subtractor).Subtract(r) }
	multiply := func(l, r ref.Val) ref.Val { return l.(traits.Multiplier).Multiply(r) }
	divide := func(l, r ref.Val) ref.Val { return l.(traits.Divider).Divide(r) }
	modulo := func(l, r ref.Val) ref.Val { return l.(traits.Modder).Modulo(r) }
	list := cel.ListType(cel.TypeParamType("A"))
	return []cel.EnvOption{
		operator("_+_", "add", add, append(numeric(),
			sig{cel.StringType, cel.StringType, cel.StringType},
			sig{cel.BytesType, cel.BytesType, cel.BytesType},
			sig{list, list, list},
			sig{cel.DurationType, cel.DurationType, cel.DurationType},
			sig{cel.DurationType, cel.TimestampType, cel.TimestampType},
			sig{cel.TimestampType, cel.DurationType, cel.TimestampType})),
		operator("_-_", "subtract", subtract, append(numeric(),
			sig{cel.DurationType, cel.DurationType, cel.DurationType},
			sig{cel.TimestampType, cel.DurationType, cel.TimestampType},
			sig{cel.TimestampType, cel.TimestampType, cel.DurationType})),
		operator("_*_", "multiply", multiply, numeric()),
		operator("_/_", "divide", divide, numeric()),
		operator("_%_", "modulo", modulo, []sig{
			{cel.IntType, cel.IntType, cel.IntType}, {cel.UintType, cel.UintType, cel.UintType},
		}),
	}
}

// sig is the signature of one overload.
type sig struct{ left, right, result *cel.Type }

func numeric() []sig {
	return []sig{
		{cel.IntType, cel.IntType, cel.IntType},
		{cel.UintType, cel.UintType, cel.UintType},
		{cel.DoubleType, cel.DoubleType, cel.DoubleType},
		{cel.IntType, cel.DoubleType, cel.DoubleType},
		{cel.DoubleType, cel.IntType, cel.DoubleType},
	}
}

func operator(symbol, name string, op func(l, r ref.Val) ref.Val, overloads []sig) cel.EnvOption {
	opts := make([]cel.FunctionOpt, 0, len(overloads))
	for _, s := range overloads {
		id := "windlass_" + name + "_" + s.left.TypeName() + "_" + s.right.TypeName()
		opts = append(opts, cel.Overload(id, []*cel.Type{s.left, s.right}, s.result, cel.BinaryBinding(func(l, r ref.Val) ref.Val {
			return op(widen(l, r), widen(r, l))
		})))
	}
	return cel.Function(symbol, opts...)
}

// widen makes an int a double where its partner is one.
func widen(v, partner ref.Val) ref.Val {
	i, isInt := v.(types.Int)
	if _, ok := partner.(types.Double); ok && isInt {
		return types.Double(i)
	}
	return v
}
